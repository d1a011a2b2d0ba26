"""POST /v1/rerank: documents by how well they answer a query, in the form of Jina, Cohere and vLLM."""
