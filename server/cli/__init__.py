"""The commands of `samewise`: the options of each, and what it does. What only that needs is imported when it runs."""
