"""The replicated state machine: pure functions from committed entries to tables."""
