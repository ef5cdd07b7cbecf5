"""From settings to running processes: the supervisor, its children, and the composition of one rank."""
