"""Code that OpenAI's APIs share: errors, pages, and the parts of answers and chunks."""
