"""Fault plans as data: steps, encoding, random plans, shrinking."""
