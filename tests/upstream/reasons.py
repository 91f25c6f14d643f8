"""Why a test of PyTorch's fails with ours in place; what is not here is a fault."""

import re

TAKEN = "expects a kernel to refuse tensors as they are; ours gives it the same attention in a form that it takes"
WORDS = "refused as SDPA does, in the words that torch has for jagged tensors"
DROPS = "compares what one seed drops in two kernels: SDPA computes heads of 2 in full, ours fills them up for a kernel"
EXACTER = (
    "allows flash 1.5 times the error of the plain way in float16; ours in its place has half the error of torch's, a "
    "rounded result, and so flash, which is torch's own to the last bit, is off by 1.01 to 1.11 of that: 5 of 128 cases"
)
REASONS = {
    r"TestSDPAFailureModes\w*\.test_(invalid_fused_inputs|invalid_last_dim_stride|unaligned_tensors)": TAKEN,
    r"TestSDPAFailureModes\w*\.test_(fused_kernels_nested_broadcasting|nested_fails_on_padding)": TAKEN,
    r"TestSDPAFailureModes\w*\.test_fused_kernels_seq_len_0_inputs": WORDS,
    r"TestTransformers\w*\.test_is_causal_gpu": TAKEN,
    r"TestTransformersCUDA\.test_transformerencoderlayer_subclass": DROPS,
    r"TestSDPACudaOnly\w*\.test_flash_\w+_nestedtensor_\w+_dropout_p_0_0_float16_\w+_is_causal_False": EXACTER,
    r"TestSDPAFailureModes\w*\.test_flash_attention_fail_with_non_square_causal": TAKEN,
}


def reason_for(name: str) -> str | None:
    """Of `TestClass.test_name`; None where there is none."""
    return next((reason for pattern, reason in REASONS.items() if re.search(pattern, name)), None)
