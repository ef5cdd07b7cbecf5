"""From a model name to tensors: sources, conversion, cache and loading."""

__all__ = ["DAMAGED"]

DAMAGED = "The file is damaged or incomplete: fetch it again"
"""What to do about a file of which a part cannot be right."""
