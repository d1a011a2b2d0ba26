"""The token inspector: an answer's tokens, their probabilities and alternatives, and a replay that verifies them."""
