"""Loading a model and making it exact: weights, activations, attention hook."""
