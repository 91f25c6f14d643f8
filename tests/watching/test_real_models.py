"""Real trained models are seen as they are, and none gets an error."""

import pytest
import torch

import attnscale
from tests import real_models
from tests.others import OTHERS_MAY_WARN

transformers = pytest.importorskip("transformers")
pytestmark = OTHERS_MAY_WARN  # transformers' and torch's own

REACTION = "CC(=O)O.OCC.O=C(Cl)c1ccccc1N>>CC(=O)OCC.O=C(O)c1ccccc1NC(C)=O"


@pytest.fixture(scope="module")
def minilm():
    folder = real_models.minilm()
    tokens = transformers.AutoTokenizer.from_pretrained(folder)
    batch = tokens(real_models.english(2400), return_tensors="pt", truncation=True, max_length=256)
    return folder, dict(batch)


def assert_no_error(audit):
    assert [str(finding) for finding in audit.findings if finding.severity == "error"] == []


@pytest.mark.parametrize("how", ["sdpa", "eager"])
def test_minilm_is_healthy_and_has_heads_that_look_at_one_token(minilm, how):
    folder, batch = minilm
    model = transformers.AutoModel.from_pretrained(folder, attn_implementation=how).eval()
    audit = attnscale.audit(model, **batch)
    assert_no_error(audit)
    assert len(audit.layers) == 6
    for layer in audit.layers.values():
        assert (layer.heads, layer.head_dim) == (12, 32)
        assert layer.scale_applied == pytest.approx(32**-0.5, rel=1e-3)
    first, *_, last = audit.layers.values()
    assert first.stats.std.max() > 10  # a head of the first layer, spread 17, top-1 0.89: trained to be sharp
    assert first.stats.top1.max() > 0.8
    assert last.stats.entropy_ratio.min() > 0.6  # none of the last
    sharp = [finding for finding in audit.findings if finding.code == "sharp"]
    assert {finding.severity for finding in sharp} <= {"note"}


def test_statistics_of_minilm_are_those_of_its_eager_weights(minilm):
    folder, batch = minilm
    eager = transformers.AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        weights = eager(**batch, output_attentions=True).attentions
    model = transformers.AutoModel.from_pretrained(folder).eval()
    with torch.no_grad(), attnscale.watch(model, rows=None) as seen:
        model(**batch)
    for layer, expected in zip(seen.layers.values(), weights, strict=True):
        expected = expected.double()
        entropy = -torch.special.xlogy(expected, expected).sum(-1).mean((0, 2))
        torch.testing.assert_close(layer.stats.entropy, entropy, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(layer.stats.top1, expected.amax(-1).mean((0, 2)), rtol=1e-4, atol=1e-5)


def reaction_tokens(folder, text):
    """The longest piece of the vocabulary first, [UNK] for what it does not know."""
    pieces = {
        piece: index
        for index, piece in enumerate((folder / "vocab.txt").read_text(encoding="utf-8").split("\n"))
        if piece
    }
    tokens, at = [pieces["[CLS]"]], 0
    while at < len(text):
        known = [piece for piece in pieces if text.startswith(piece, at)]
        piece = max(known, key=len, default="[UNK]")
        tokens.append(pieces[piece])
        at += len(piece) if known else 1
    return torch.tensor([[*tokens, pieces["[SEP]"]]])


@pytest.mark.parametrize("text", [REACTION, real_models.english(200)], ids=["a reaction", "English"])
def test_rxnmapper_shares_one_layer_twelve_times_and_is_healthy(text):
    folder = real_models.rxnmapper()
    model = transformers.AlbertModel.from_pretrained(folder).eval()
    audit = attnscale.audit(model, reaction_tokens(folder, text))
    assert_no_error(audit)
    assert len(audit.layers) == 12
    for depth, (name, layer) in enumerate(audit.layers.items()):
        assert name.endswith(f"[{depth}]")
        assert (layer.calls, layer.heads, layer.head_dim) == (1, 8, 32)
        assert layer.scale_applied == pytest.approx(32**-0.5, rel=1e-3)
    # heads that map atoms, spread 11 on a text they do not know
    assert max(float(layer.stats.std.max()) for layer in audit.layers.values()) > 3


@pytest.mark.slow
def test_stories_is_causal_and_healthy():
    model, tokens = real_models.stories()
    story = tokens("Once upon a time, there was a little girl named Lily. She loved to play outside in the park.")
    with torch.no_grad():
        assert model(story, labels=story).loss < 1.5  # it tells stories: the weights are where they belong
    for text in (story, tokens(real_models.english(900))[:, :256]):
        audit = attnscale.audit(model, text)
        assert_no_error(audit)
        assert len(audit.layers) == 6
        for layer in audit.layers.values():
            assert layer.causal
            assert (layer.heads, layer.head_dim) == (6, 48)
            assert layer.scale_applied == pytest.approx(48**-0.5, rel=1e-3)
            assert 0.2 < layer.stats.entropy_ratio.mean() < 0.95


def test_a_pickle_that_holds_more_than_tensors_is_refused_by_torch_too():
    with pytest.raises(Exception, match=r"[Ww]eights.only"):
        torch.load(real_models.refused_pickle(), weights_only=True)
