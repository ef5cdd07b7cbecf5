"""Benchmarks that anyone can repeat: each is a command that prints JSON."""
