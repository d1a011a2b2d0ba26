"""OpenAI's Batch API: many requests in a file, answered with idle capacity."""
