import pytest
import torch


@pytest.fixture
def flash_on_a_cpu():
    """The kernel behind torch's varlen_attn as flash-attn documents it, written out: windows are aligned to the end."""
    library = torch.library.Library("aten", "IMPL")

    def flash(query, key, value, starts_q, starts_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, **options):
        outputs = []
        sequences = (tokens.split(starts.diff().tolist()) for tokens, starts in (
            (query, starts_q), (key, starts_k), (value, starts_k)
        ))  # fmt: skip
        for q, k, v in zip(*sequences, strict=True):
            scores = q.transpose(0, 1) @ k.permute(1, 2, 0) * options["scale"]
            ahead = torch.arange(len(k)) - (torch.arange(len(q)).unsqueeze(-1) + len(k) - len(q))
            left, right = options["window_size_left"], 0 if is_causal else options["window_size_right"]
            hidden = ((ahead > right) & (right >= 0)) | ((ahead < -left) & (left >= 0))
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1).nan_to_num()
            outputs.append((weights @ v.transpose(0, 1)).transpose(0, 1))
        nothing = query.new_zeros(0)
        return torch.cat(outputs), query.new_zeros(query.shape[1], len(query)), nothing, nothing, nothing

    library.impl("_flash_attention_forward", flash, "CPU")
    yield
    library._destroy()
