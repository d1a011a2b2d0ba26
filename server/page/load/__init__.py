"""The Server view: the load of the server, second by second, and the last requests."""
