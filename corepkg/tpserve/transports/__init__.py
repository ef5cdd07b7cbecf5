"""The transports that tpserve itself brings."""
