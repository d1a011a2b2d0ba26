"""Scores that mix the model's distribution with another one: between its logits and the processors."""
