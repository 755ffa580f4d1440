"""Decide from a history alone whether a promise was broken. Pure functions over arrays."""
