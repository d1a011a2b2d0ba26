"""The engine process and the client through which the HTTP side uses it."""
