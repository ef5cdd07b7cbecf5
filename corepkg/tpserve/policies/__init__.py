"""The built-in scheduling policies: pure functions from a view of the queues to a plan."""
