"""Structured output: turns a client's constraint into one llguidance grammar, without tokenizer or model."""
