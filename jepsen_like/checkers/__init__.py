"""Decide from a history alone whether a guarantee was violated. Pure functions over arrays."""
