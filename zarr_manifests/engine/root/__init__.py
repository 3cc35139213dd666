"""The one mutable object: the root state, read and replaced by compare-and-swap."""
