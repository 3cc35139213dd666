"""Zone maps: what is known of the values in chunks, and which chunks may match a query."""
