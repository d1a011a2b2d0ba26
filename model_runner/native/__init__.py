"""Models of known families on CPU: one native call goes from tokens to logits."""
