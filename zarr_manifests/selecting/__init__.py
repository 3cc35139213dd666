"""Which chunks of an array may hold cells that a where selects."""
