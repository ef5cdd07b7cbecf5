"""Message transport over NNG, for tpserve. Importing this package loads no pynng."""
