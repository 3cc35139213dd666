"""References to bytes outside the repository: which places may be read, and how."""
