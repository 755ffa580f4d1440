"""The command line: histories made, read and checked."""
