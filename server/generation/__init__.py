"""Generation: from a request to its events, the same for every API."""
