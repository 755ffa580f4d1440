"""pysyncobj made safe: the only package that imports it."""
