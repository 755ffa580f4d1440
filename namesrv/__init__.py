"""NameServer: a stateless peer that knows which broker serves which topic."""
