"""Replica audit: what several data folders hold, compared byte by byte up to the commit point."""
