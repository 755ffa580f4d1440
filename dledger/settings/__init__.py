"""The settings of a broker: its tables, how they are written, and what the parts get."""
