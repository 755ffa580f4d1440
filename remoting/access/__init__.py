"""Who may ask what of a daemon: accounts, what they may do, and the check of every request."""
