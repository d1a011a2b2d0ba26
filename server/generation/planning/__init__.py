"""From a request to its plan: every field becomes part of it, is reported, or the request is refused."""
