"""``format("dledger")``: topics and segment folders as DataFrames, and DataFrames as messages."""
