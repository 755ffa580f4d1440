"""A page in Prometheus' text format, and what every daemon shows on it."""
