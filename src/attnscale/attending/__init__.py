"""Attention whose scale is known, run by torch's fused kernels, FlexAttention, or in blocks of rows."""
