"""Attention and ops on FlashInfer, for tpserve."""
