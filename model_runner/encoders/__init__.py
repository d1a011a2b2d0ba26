"""Encoders: models that turn whole texts into embeddings and scores, and generate nothing."""
