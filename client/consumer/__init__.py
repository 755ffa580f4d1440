"""Pulls messages and consumes them as a member of a group."""
