"""Guessing tokens ahead, and verifying the guesses: proposers, the controller, and the walk along what was guessed."""
