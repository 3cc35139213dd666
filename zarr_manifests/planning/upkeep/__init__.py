"""What compaction, expiry and garbage collection do, and when."""
