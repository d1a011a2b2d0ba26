"""Look inside an answer: its tokens, what else they might have been, where they came from, and that they come again."""
