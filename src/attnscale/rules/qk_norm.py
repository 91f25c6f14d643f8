"""RMS-normalised queries and keys (Henry et al. 2020; Dehghani et al. 2023)."""

import math

import torch
from torch import Tensor, nn

from attnscale.numerics import wide_dtype
from attnscale.rules.rule import Scaled, Visible, about, per_head

RMS_EPS = 1e-6  # the value of Llama and Qwen3; keeps a zero vector at zero


@about(
    formula="rms(q)g_q · rms(k)g_k / √d_k",
    source="QKNorm: Henry et al. 2020, arXiv:2010.04245; ViT-22B, arXiv:2302.05442",
    use="scores that grow during training: they cannot pass √d_k times the gains",
)
class QKNorm(nn.Module):
    """rms(q) g_q · rms(k) g_k / √d_k, with learned gains per head and dimension, initially one."""

    def __init__(
        self,
        head_dim: int,
        heads: int,
        kv_heads: int | None = None,
        eps: float = RMS_EPS,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.query_gain = nn.Parameter(torch.empty(heads, head_dim, device=device, dtype=dtype))
        self.key_gain = nn.Parameter(torch.empty(kv_heads or heads, head_dim, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start with gains of one."""
        nn.init.ones_(self.query_gain)
        nn.init.ones_(self.key_gain)

    def forward(self, query: Tensor, key: Tensor, visible: Visible = None) -> Scaled:
        """Normalise both in float32 or wider; the kernel applies 1/√d_k."""
        return self._norm(query, self.query_gain), self._norm(key, self.key_gain), 1 / math.sqrt(query.shape[-1])

    def _norm(self, tensor: Tensor, gain: Tensor) -> Tensor:
        wide = tensor.to(wide_dtype(tensor))
        normalised = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (normalised * per_head(gain.to(wide.dtype), tensor)).to(tensor.dtype)

    def extra_repr(self) -> str:
        """Return the sizes, for print(model)."""
        heads, head_dim = self.query_gain.shape
        return f"head_dim={head_dim}, heads={heads}, kv_heads={self.key_gain.shape[0]}, eps={self.eps}"
