"""Embeddings and scores: numbers that the engine makes of prompts, in place of answers."""
