"""Load against any OpenAI-compatible server: what to send, when, and what came of it."""
