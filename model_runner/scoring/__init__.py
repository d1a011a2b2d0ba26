"""Scores of tokens and of prompts that take more than the logits of the model."""
