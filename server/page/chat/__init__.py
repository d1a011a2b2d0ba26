"""The chat: the conversation that is looked at, its composer, the list of all of them."""
