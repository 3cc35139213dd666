"""The engine: does what plans say, with storage below and no Zarr store above."""
