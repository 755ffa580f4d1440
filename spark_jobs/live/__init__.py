"""The verdict while a run goes on."""
