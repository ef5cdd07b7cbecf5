"""What runs next: the round, the queues, the batch and the digest of all that was decided. Knows no engine."""
