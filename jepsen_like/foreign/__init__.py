"""Histories that Jepsen recorded: read, judged under the names of Jepsen and Elle, written."""
