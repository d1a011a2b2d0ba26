"""Who uses the server: keys, what each may use, and what each has used."""
