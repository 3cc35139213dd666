"""The same data in another layout: runs, merged leaves, repacked chunks, the presence index."""
