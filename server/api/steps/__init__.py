"""What the engine does."""
