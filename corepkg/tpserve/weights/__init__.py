"""From a model name to tensors: sources, conversion, cache and loading."""
