"""The engine: carries out plans on the storage below, without the Zarr store above."""
