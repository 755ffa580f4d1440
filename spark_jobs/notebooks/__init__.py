"""The notebook that checks a history, and what it draws with."""
