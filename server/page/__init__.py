"""The web page: chat, compare answers, inspect tokens and watch the server. It uses only the public API."""
