"""What OpenAI's APIs have in common: their errors, and what their answers and chunks consist of."""
