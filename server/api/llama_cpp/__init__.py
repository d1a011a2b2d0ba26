"""llama.cpp's own API: POST /completion, /infill and /apply-template, GET /props and /slots."""
