"""The terminal chat: the conversation, the server that answers, and the terminal between them."""
