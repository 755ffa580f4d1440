"""What a broker shows of itself in Prometheus' text format."""
