"""What the server does, second by second, and what became of the last requests."""
