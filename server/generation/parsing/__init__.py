"""From what a model writes to what it means: reasoning, text, tool calls."""
