"""Copies a cluster into a second one, with equal queue offsets.

Decision: docs/internals/decisions/0023-mirror.md.
"""
