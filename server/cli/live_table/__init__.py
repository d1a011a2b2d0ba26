"""A live table of what servers do: reads their metrics, forms rates, shows them."""
