"""Reads and changes topics, groups, offsets and dead letters."""
