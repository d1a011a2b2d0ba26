"""Plain torch: what kernels are tested against."""
