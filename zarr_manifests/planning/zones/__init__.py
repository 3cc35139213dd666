"""Which chunks may match a query, from bounds of their values."""
