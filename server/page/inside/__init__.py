"""A look inside an answer: its tokens, their probabilities and alternatives, and proof by replay."""
