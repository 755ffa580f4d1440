"""Sends messages, batches, requests and transactions."""
