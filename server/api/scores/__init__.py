"""POST /v1/score: how well documents answer queries, in vLLM's form."""
