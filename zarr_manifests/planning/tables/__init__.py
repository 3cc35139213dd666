"""Chunk tables: merged, selected, counted and moved."""
