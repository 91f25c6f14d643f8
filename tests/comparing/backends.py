"""Small transformers models, and attention implementations with a bug each, registered as a library would."""

import torch
import torch.nn.functional as F
import transformers
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

TOKENS = dict(vocab_size=97, pad_token_id=0, bos_token_id=1, eos_token_id=2)
SIZES = dict(
    hidden_size=40, intermediate_size=53, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=14
)
WINDOW, SOFTCAP = 5, 20.0


def llama():
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **TOKENS)).eval()


def gemma2():
    """A window in the first layer, a soft-cap in both, and a scale of its own."""
    torch.manual_seed(0)
    own = dict(sliding_window=WINDOW, attn_logit_softcapping=SOFTCAP, query_pre_attn_scalar=23)
    return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**SIZES, **TOKENS, **own)).eval()


def gpt2():
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=52, n_layer=2, n_head=4, **TOKENS)).eval()


def gpt_oss():
    """Sinks of their own in each head, and a window in the first layer."""
    torch.manual_seed(0)
    sizes = SIZES | dict(hidden_size=48, intermediate_size=48, head_dim=16, num_local_experts=2, num_experts_per_tok=1)
    config = transformers.GptOssConfig(**sizes, **TOKENS, sliding_window=WINDOW)
    model = transformers.GptOssForCausalLM(config).eval()
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks)
    return model


def tokens():
    torch.manual_seed(1)
    return torch.randint(3, 97, (2, 13))


def padded():
    """The second sequence has three tokens of padding on the left."""
    mask = torch.ones(2, 13, dtype=torch.long)
    mask[1, :3] = 0
    return {"input_ids": tokens(), "attention_mask": mask}


def default_scale(module, query, key, value, mask, scaling=None, **others):
    return eager_attention_forward(module, query, key, value, mask, scaling=query.shape[-1] ** -0.5, **others)


def without_a_mask(module, query, key, value, mask, scaling=None, **others):
    key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value))
    return F.scaled_dot_product_attention(query, key, value, scale=scaling).transpose(1, 2).contiguous(), None


def one_key_more(module, query, key, value, mask, scaling=None, **others):
    """A window that begins one key earlier, in layers that have one."""
    if mask is not None and getattr(module, "sliding_window", None):
        position = torch.arange(query.shape[2])
        mask = mask | (position[:, None] - position == module.sliding_window)
    return without_a_softcap(module, query, key, value, mask, scaling=scaling, **others)


def without_a_softcap(module, query, key, value, mask, scaling=None, softcap=None, **others):
    return sdpa_attention_forward(module, query, key, value, mask, scaling=scaling, **others)


def other_values(module, query, key, value, mask, scaling=None, **others):
    return sdpa_attention_forward(module, query, key, 1.1 * value, mask, scaling=scaling)


def broken(module, query, key, value, mask, scaling=None, **others):
    raise RuntimeError("no kernel for this device")


for function in (default_scale, without_a_mask, one_key_more, without_a_softcap, other_values, broken):
    transformers.AttentionInterface.register(function.__name__, function)
    mask_of = transformers.masking_utils.eager_mask if function is default_scale else sdpa_mask
    transformers.AttentionMaskInterface.register(function.__name__, mask_of)
