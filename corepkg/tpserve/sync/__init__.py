"""The count synchronisations that tpserve itself brings."""
