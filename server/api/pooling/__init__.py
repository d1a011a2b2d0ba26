"""POST /v1/embeddings, /embed, /v1/score and /v1/rerank: answers that are numbers."""
