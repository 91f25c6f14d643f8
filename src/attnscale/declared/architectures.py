"""Published architectures whose scale is not 1/√d_k, and whose configuration does not say so.

Read from their code in transformers 5.22; `tests/declared/test_architectures.py` builds every one of them and holds
the scale it applies to what is said here. An architecture is known by the `model_type` of its configuration, or of the
part of it that configures the attention, never by its weights.
"""

from attnscale.declared.fields import field, number
from attnscale.declared.parents import Parents

# Folded into the initialisation of the query projection (T5 and its descendants), or left out (GPT-Neo, Dia).
UNSCALED = {
    "t5", "mt5", "umt5", "longt5", "switch_transformers", "udop", "pop2piano",
    "pix2struct_text_model", "pix2struct_vision_model", "gpt_neo", "dia_encoder", "dia_decoder",
}  # fmt: skip
# Three sums in one score, content and two of position, under one root: 1/√(3 d_k) where both are used.
DISENTANGLED = {"deberta", "deberta-v2", "sew-d"}
# Normalised queries and keys, divided by d_k.
BY_DIM = {"inkling_text"}
# 1/√width of the stage, whatever its heads: the released weights were trained with it.
BY_WIDTH = {"cvt"}


def architecture_scale(config: object | None, around: Parents, head_dim: int) -> tuple[float, str] | None:
    """The multiplier that an architecture is published with, where nothing else says it."""
    kind = field(config, "model_type")
    if not isinstance(kind, str):
        return None
    if kind in UNSCALED:
        return 1.0, f"the published {kind}"
    if kind in BY_DIM:
        return 1 / head_dim, f"the published {kind}"
    if kind in DISENTANGLED:
        terms = {"c2p", "p2c"} & set(field(config, "pos_att_type") or ())
        return ((1 + len(terms)) * head_dim) ** -0.5, f"the published {kind}"
    if kind in BY_WIDTH:
        width = next((found for _, module in around if (found := number(module, "embed_dim"))), None)
        return None if width is None else (width**-0.5, f"the published {kind}")
    return None
