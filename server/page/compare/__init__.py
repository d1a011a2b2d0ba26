"""The compare view: one prompt answered with several settings side by side, and beam search as a tree."""
