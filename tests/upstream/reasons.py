"""Why a test of PyTorch's fails with ours in place; what is not here is a fault."""

import re

TAKEN = "expects a kernel to refuse tensors as they are; ours gives it the same attention in a form that it takes"
REASONS = {
    r"TestSDPAFailureModes\w*\.test_(invalid_fused_inputs|invalid_last_dim_stride|unaligned_tensors)": TAKEN,
    r"TestSDPAFailureModes\w*\.test_(fused_kernels_nested_broadcasting|nested_fails_on_padding)": TAKEN,
    r"TestSDPAFailureModes\w*\.test_fused_kernels_seq_len_0_inputs": TAKEN,
    r"TestSDPAFailureModes\w*\.test_flash_attention_fail_with_non_square_causal": TAKEN,
}


def reason_for(name: str) -> str | None:
    """Of `TestClass.test_name`; None where there is none."""
    return next((reason for pattern, reason in REASONS.items() if re.search(pattern, name)), None)
