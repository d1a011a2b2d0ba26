"""What clients send and get: pydantic models, one module for each kind."""
