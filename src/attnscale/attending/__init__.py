"""Attention with a numeric scale, run by torch's fused kernels, by FlexAttention, or in blocks of rows."""
