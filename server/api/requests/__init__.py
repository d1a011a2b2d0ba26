"""What became of requests."""
