"""HTTP code that all endpoints share: bodies, keys, errors, streams and connections."""
