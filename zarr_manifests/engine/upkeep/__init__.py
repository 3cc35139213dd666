"""A small and sound repository: expiry, garbage collection, verification, recovery."""
