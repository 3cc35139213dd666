"""These files are no tests: the comparison is run by `tests/docs/test_benchmarks.py`."""

collect_ignore_glob = ["*.py"]
