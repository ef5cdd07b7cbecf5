"""Attention over a paged cache in plain torch."""
