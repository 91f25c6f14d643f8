"""Selected published models with their multipliers of q·k, and published sizes of scores."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Setting:
    """Head dimension and multiplier of a published model, with their source."""

    model: str
    year: int
    millions: float  # parameters in millions
    head_dim: int
    multiplier: float
    stated: str
    language: bool = True
    learned: bool = False

    @property
    def relative(self) -> float:
        """Multiplier · √d_k: 1 for the scale 1/√d_k, √d_k without a scale, 1/√d_k for division by d_k."""
        return self.multiplier * math.sqrt(self.head_dim)

    @property
    def standard(self) -> bool:
        """True if q·k is multiplied by exactly 1/√d_k."""
        return not self.learned and math.isclose(self.relative, 1.0, rel_tol=1e-9)

    def __str__(self) -> str:
        return f"{self.model} {self.relative:.3g}"


SETTINGS = (
    Setting("Transformer", 2017, 65, 64, 1 / 8, "Vaswani et al. 2017, section 3.2.1 and table 3"),
    Setting("GPT", 2018, 117, 64, 1 / 8, "released code: 768 dimensions over 12 heads, scores divided by √64"),
    Setting("GPT-2", 2019, 124, 64, 1 / 8, "transformers GPT2Config: n_embd 768, n_head 12, scale_attn_weights"),
    Setting("T5-base", 2019, 220, 64, 1.0, "transformers T5Attention.scaling, T5Config.d_kv"),
    Setting("GPT-Neo 1.3B", 2021, 1300, 128, 1.0, "transformers GPTNeoSelfAttention; hidden_size 2048, 16 heads"),
    Setting("GPT-J 6B", 2021, 6000, 256, 1 / 16, "transformers GPTJAttention.scale_attn; n_embd 4096, n_head 16"),
    Setting("all-MiniLM-L6-v2", 2021, 22.7, 32, 32**-0.5, "its configuration: BERT, hidden_size 384, 12 heads"),
    Setting("LLaMA-2 7B", 2023, 6740, 128, 128**-0.5, "transformers LlamaAttention.scaling; 4096 over 32 heads"),
    Setting("stories15M", 2023, 15, 48, 48**-0.5, "llama2.c: dim 288, n_heads 6, scores divided by √head_size"),
    Setting("Gemma-2 27B", 2024, 27200, 128, 144**-0.5, "its configuration: query_pre_attn_scalar 144, head_dim 128"),
    Setting("Granite 3.1 2B", 2024, 2500, 64, 1 / 64, "its configuration: attention_multiplier; 2048 over 32 heads"),
    Setting("Swin-v2", 2021, 88, 32, 10.0, "Liu et al. 2022: cosines, learned 1/τ starting at 10", False, True),
)


@dataclass(frozen=True)
class LearnedScale:
    """Published model with a learned multiplier of q·k, and its source."""

    model: str
    what: str
    language: bool
    is_temperature: bool  # True for one number per head in place of √d_k, False for a gain per dimension
    stated: str

    def __str__(self) -> str:
        return f"{self.model} ({self.what})"


LEARNED = (
    LearnedScale("Swin-v2", "one temperature a head", False, True, "transformers Swinv2SelfAttention.logit_scale"),
    LearnedScale("TimesFM 2.5", "a gain of every dimension", False, False, "transformers TimesFm2_5Attention.scaling"),
    LearnedScale("nGPT", "a gain of every dimension of normed q and k", True, False, "Loshchilov et al. 2024, s_qk"),
    LearnedScale("Qwen3", "gains of its QK-norm", True, False, "transformers Qwen3Attention.q_norm, k_norm"),
)

CLIPPED_AT = 100.0  # Kimi K2 rescales a head's query and key weights above this score

MUP_ATTENTION = 8.0  # the mup package of Tensor Programs V multiplies by 8/d_k: 1/√d_k at d_k = 64

LLAMA4_FLOOR = 8192  # transformers Llama4TextConfig.floor_scale
LLAMA4_SLOPE = 0.1  # transformers Llama4TextConfig.attn_scale


def llama4_temperature(position: int) -> float:
    """Return the factor on queries, besides 1/√d_k, in Llama 4's layers without rotary positions."""
    return 1 + LLAMA4_SLOPE * math.log1p((position + 1) // LLAMA4_FLOOR)


def find(model: str) -> Setting:
    """Return the setting of a model."""
    return next(setting for setting in SETTINGS if setting.model == model)


T5 = find("T5-base")
FULL_SIZE = 100  # million parameters: the smallest GPT-2 has 124


def language_models(since: int = 0, before: int = 9999, millions: float = 0.0) -> list[Setting]:
    """List the language models of these years with at least `millions` of parameters."""
    return [s for s in SETTINGS if s.language and since <= s.year < before and s.millions >= millions]
