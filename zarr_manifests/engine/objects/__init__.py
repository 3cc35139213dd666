"""Immutable objects and chunk bytes: written once, fetched once, cached and verified."""
