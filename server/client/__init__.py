"""Client side of OpenAI-compatible servers: parses their answers and interprets their metrics."""
