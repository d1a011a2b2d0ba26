"""From a request's fields to what the engine does: every field is honoured, or the request is refused."""
