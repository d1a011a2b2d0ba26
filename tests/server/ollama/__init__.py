"""Ollama's API, by its own client and by the requests of programs that use it."""
