"""What spark-submit starts."""
