"""OpenAI's responses: POST /v1/responses and what belongs to it."""
