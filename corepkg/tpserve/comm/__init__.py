"""Tensor communication between the ranks of one group."""
