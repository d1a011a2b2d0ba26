"""What a key has used."""
