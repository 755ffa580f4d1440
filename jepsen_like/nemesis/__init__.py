"""Does to a cluster what a plan says, simulated or real, and undoes it."""
