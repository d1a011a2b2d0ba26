"""From logits to tokens: processors in their documented order, counter-based noise, logprobs."""
