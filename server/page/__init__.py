"""The web page: talk to the model, look inside its answers, see what the server does.

It knows the server by the public API alone, so that it can be put before any OpenAI-compatible one. Only `gate` is
imported while nobody looks.
"""
