"""SDK: producer, pull consumer and admin, with automatic leader discovery."""
