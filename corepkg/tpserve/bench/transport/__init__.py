"""``tpserve bench transport``: rounds over one choice of parts measured against rounds over another."""
