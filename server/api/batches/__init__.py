"""OpenAI's batches: many requests in a file, answered in the room that others leave."""
