"""Breaks real clusters: processes, faults from the operating system, clients over sockets."""
