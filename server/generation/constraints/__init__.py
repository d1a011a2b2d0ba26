"""What a client wants its answer to look like, as one grammar of llguidance: pure functions, no tokenizer, no model."""
