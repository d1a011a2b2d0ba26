"""POST /tokenize, POST /detokenize and GET /tokenizer_info."""
