"""Request fields that several APIs share, and the errors for wrong values."""
