"""JSON schemas: what of them can be enforced, in a form that llguidance compiles in bounded time."""
