"""The settings of requests: what a server says of them, and a form made of that."""
