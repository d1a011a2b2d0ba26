"""What all endpoints share: bodies, keys, errors, streams, connections."""
