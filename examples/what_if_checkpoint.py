"""Try scales on a checkpoint: see what another scale would do to this model, then apply it.

The checkpoint, of a model without a scale, is created and saved here; in your run, use your own file.

    python examples/what_if_checkpoint.py
"""

import tempfile
from pathlib import Path
from textwrap import fill

import torch
from safetensors.torch import load_model, save_model

import attnscale
from attnscale.diagnose import Candidate
from attnscale.models import CausalTransformer
from attnscale.models.text import VOCABULARY, default_text, encode

LAYER = "blocks.0.attention"


def forgetful() -> CausalTransformer:
    """Return a transformer whose scores are q·k, with a multiplier of one."""
    return CausalTransformer(VOCABULARY, d_model=128, layers=2, heads=2, scale=1.0)


def checkpoint() -> CausalTransformer:
    """Save the model, and load it again."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        save_model(forgetful(), str(path))
        model = forgetful()
        load_model(model, path)
    return model


def main() -> None:
    """Audit the checkpoint, try fixes on one layer, apply the one that helps, and audit again."""
    model = checkpoint()
    tokens = encode(default_text())[:1024].view(4, 256)
    audit = attnscale.audit(model, tokens)
    for finding in audit.findings:
        print(fill(str(finding), 100, subsequent_indent="  "))
    print()
    fixes = {
        "1/√d_k": "inverse_sqrt",
        "1/d_k": 1 / 64,
        "QK-norm": "QKNorm",
        "soft-cap 30": Candidate(1.0, softcap=30.0),
    }
    print(audit.what_if(LAYER, fixes), end="\n\n")
    report = attnscale.rescale_(model, "inverse_sqrt", tokens)
    print(report, end="\n\n")
    print(attnscale.audit(model, tokens))


if __name__ == "__main__":
    main()
