"""The engine process and what the HTTP side uses to talk to it."""
