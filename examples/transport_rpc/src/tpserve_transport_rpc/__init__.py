"""Message transport by remote calls over RPyC, for tpserve. Importing this package loads no rpyc."""
