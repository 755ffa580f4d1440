"""The broker: one Raft group whose log is the CommitLog."""
