"""The models of a server: which are in memory, and what that takes."""
