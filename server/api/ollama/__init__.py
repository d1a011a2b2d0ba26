"""Ollama's own API: POST /api/chat, /api/generate, /api/embed and others below /api, and GET /."""
