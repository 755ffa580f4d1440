"""What a chaos run was, as one page a person can read, and a list of such pages."""
