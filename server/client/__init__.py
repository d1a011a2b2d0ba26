"""What a client of an OpenAI-compatible server has to know: its answers, and what its metrics say."""
