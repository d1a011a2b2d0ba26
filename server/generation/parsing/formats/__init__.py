"""How families of models write calls of tools: a file for each format."""
