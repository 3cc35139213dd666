"""Pictures of history, of chunk grids and of differences, from values alone."""
