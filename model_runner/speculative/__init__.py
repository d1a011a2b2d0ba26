"""Guessing tokens ahead, and verifying the guesses: proposers, the budget, and the walk along what was guessed."""
