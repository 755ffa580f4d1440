"""Planted bugs: what the simulator must find without knowing that they are there."""
