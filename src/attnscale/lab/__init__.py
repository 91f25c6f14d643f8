"""Experiments: grids of seeded cells that run anywhere, resume, and say what is true from their numbers."""
