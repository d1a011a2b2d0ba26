"""The OpenAI API: request and response models, and the endpoints that speak them."""
