"""The front end: HTTP, texts and tokens. Imports no torch."""
