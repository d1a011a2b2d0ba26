"""Structured output: the form that a client asks for, as one grammar of llguidance, without tokenizer or model."""
