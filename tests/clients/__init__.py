"""Other people's clients against the server: `make test-clients` installs and runs them."""
