"""Models from the Hugging Face hub, from URLs, and from the folders of other programs. Imports no torch."""
