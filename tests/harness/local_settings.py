"""Settings of brokers that are started for one test."""

SMALL_FILES: dict[str, object] = {"store.mapped_file_size_commit_log": 16 << 20}
"""Three brokers share one disk, and a test has few messages."""
