"""Settings of a daemon: listed once, read from files and options, changed while it runs."""
