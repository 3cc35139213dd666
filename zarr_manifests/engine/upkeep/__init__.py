"""Keeping a repository small and sound: expiry, garbage collection, verification, recovery."""
