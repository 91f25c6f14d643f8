"""Measuring on a CUDA device: operators, and the kernels behind them."""
