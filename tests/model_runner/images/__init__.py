"""Images: decoding, layouts, features."""
