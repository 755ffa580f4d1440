"""Tools for people who test against a broker."""
