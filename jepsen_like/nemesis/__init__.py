"""Injects the faults of a plan into a cluster, simulated or real, and heals them."""
