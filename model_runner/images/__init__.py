"""Images of prompts: what they are, how they are read, and the features that the model sees."""
