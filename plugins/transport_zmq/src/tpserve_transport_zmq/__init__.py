"""Message transport over ZeroMQ, for tpserve."""
