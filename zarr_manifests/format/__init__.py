"""Bytes to values and back: every object of a repository, field by field in `docs/spec/v1.md`."""
