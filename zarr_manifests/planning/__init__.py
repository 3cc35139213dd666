"""Decisions as pure functions: values in, frozen plans out, no I/O."""
