"""The comparison: one prompt, answered in several ways side by side, and beam search as a tree."""
