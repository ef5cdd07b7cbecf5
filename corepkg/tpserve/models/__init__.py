"""Model shapes and the decoder."""
