"""What a commit changed, and whether it can go on top of what others committed."""
