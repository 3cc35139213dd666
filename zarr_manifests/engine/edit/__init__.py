"""Uncommitted changes: laid over a snapshot, packed, forked and merged."""
