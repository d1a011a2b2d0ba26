"""Draft heads: small networks that guess a target's next tokens from its hidden states. One file for each kind."""
