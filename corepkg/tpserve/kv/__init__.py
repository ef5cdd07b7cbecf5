"""Which request holds which page of the KV pool. Knows no engine: pages are numbers."""
