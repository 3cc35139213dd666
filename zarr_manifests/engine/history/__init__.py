"""Which snapshots there are, what lies between two of them, and who may still read them."""
