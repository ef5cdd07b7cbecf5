"""Layer steps and sampling in plain torch."""
