"""Encode and decode every metadata object of a repository, as `docs/spec/v1.md` specifies."""
