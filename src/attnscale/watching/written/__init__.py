"""Attention written out by hand: a product of activations, followed to its softmax."""
