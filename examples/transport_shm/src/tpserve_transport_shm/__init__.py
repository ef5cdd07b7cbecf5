"""Message transport through shared memory, for tpserve. Importing this package loads nothing large."""
