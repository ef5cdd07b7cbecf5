"""Message transport over ZeroMQ, for tpserve. Importing this package loads no zmq."""
