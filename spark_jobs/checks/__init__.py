"""What is decided over columns. Pure: no Spark, no files."""
