"""A look inside an answer: its tokens, how probable they were, what could have stood there, and proof by replay."""
