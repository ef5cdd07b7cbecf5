"""The A/B bench of whole servers: ``tpserve bench serve``."""
