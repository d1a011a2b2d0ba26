"""The comparison: one prompt, answered in several ways beside each other, and beam search as a tree."""
