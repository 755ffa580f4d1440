"""A web console: shows a cluster in a browser, and changes it where that is allowed."""
