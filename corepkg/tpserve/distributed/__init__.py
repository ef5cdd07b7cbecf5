"""Splitting a model over ranks, and the process groups between them."""
