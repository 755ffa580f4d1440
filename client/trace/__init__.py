"""Writes message trace: what became of each message at this client."""
