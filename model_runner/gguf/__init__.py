"""GGUF files, the format of llama.cpp: what they hold, and what this server makes of it."""
