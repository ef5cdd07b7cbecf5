"""Message transport over NNG, for tpserve."""
