"""Experiments: grids of seeded cells that run on any executor, can be resumed, and end in a conclusion."""
