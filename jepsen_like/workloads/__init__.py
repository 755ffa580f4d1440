"""What clients do during a run, in a simulated world or a real one."""
