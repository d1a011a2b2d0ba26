"""Weights of models as files hold them: matrices, checkpoints and parameters."""  # Short: names a package
