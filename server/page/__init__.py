"""The web page: chat with a model, look inside its answers, watch its server. It knows only the public API."""
