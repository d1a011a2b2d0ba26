"""llama.cpp's own API."""
