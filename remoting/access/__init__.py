"""Access control of a daemon: accounts, their permissions, and the check of every request."""
