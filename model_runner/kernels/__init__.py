"""Native kernels: their sources, how they are built, and how Python calls them."""
