"""Images in requests, on a fake engine."""
