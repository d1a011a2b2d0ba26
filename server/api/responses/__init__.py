"""OpenAI's Responses API: responses, stored conversations and websockets."""
