"""A model that was followed once, known again by its kernels alone."""
