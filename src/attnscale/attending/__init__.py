"""What runs an attention once its scale is known: torch's fused kernels, FlexAttention, or blocks of rows."""
