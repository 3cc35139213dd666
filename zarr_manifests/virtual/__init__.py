"""References to bytes elsewhere: which places may be read, and how they are."""
