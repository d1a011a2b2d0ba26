"""Models of transformers: their modules, with our attention, mixers and experts."""
