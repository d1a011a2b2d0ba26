"""Model runner: loads models and executes steps. The only package that imports torch and transformers' model code."""
