"""What one snapshot says: its nodes, its chunk tables, its totals, and what to preload."""
