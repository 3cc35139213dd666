"""Spark drivers and executors that the tests may kill."""
