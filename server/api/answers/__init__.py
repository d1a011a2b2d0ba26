"""What answers of several endpoints consist of."""
