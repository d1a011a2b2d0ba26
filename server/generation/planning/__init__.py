"""Planning: turns a request into the engine's requests. Each field is honoured, reported or refused."""
