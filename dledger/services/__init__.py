"""Leader-only work, run inside the leadership scope."""
