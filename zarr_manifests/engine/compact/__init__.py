"""The same data in another shape: runs, merged leaves, repacked chunks, the presence index."""
