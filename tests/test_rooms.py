"""The house: who may import whom, what is exported, what importing costs."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import attnscale

SRC = Path(attnscale.__file__).parent

# A room imports only what stands before it.
ROOMS = (
    "plain", "errors", "extras", "files", "shapes", "numerics", "module_paths", "torch_internals", "reference",
    "theory", "rules", "visibility", "inputs", "attending", "operator", "modules", "measure", "declared", "tracing",
    "watching", "probes", "diagnose", "acting", "train", "models", "loading", "checking", "comparing", "bench",
    "lab", "claims", "show", "cli",
)  # fmt: skip


def room(path):
    return path.relative_to(SRC).parts[0].removesuffix(".py")


def imported_rooms(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [node.module] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for name in names:
            if name and name.startswith("attnscale."):
                yield name.split(".")[1]


def python(code, **environment):
    run = [sys.executable, "-c", code]
    return subprocess.run(run, capture_output=True, text=True, check=True, env=os.environ | environment).stdout


def test_every_module_stands_in_a_room():
    files = {room(path) for path in SRC.rglob("*.py")} - {"__init__", "__main__"}
    assert files == set(ROOMS)


@pytest.mark.parametrize(
    "path", [p for p in SRC.rglob("*.py") if room(p) in ROOMS], ids=lambda p: str(p.relative_to(SRC))
)
def test_imports_go_one_way(path):
    allowed = ROOMS[: ROOMS.index(room(path)) + 1]
    assert set(imported_rooms(path)) <= set(allowed)


def named_homes(path):
    """Classes that a module names as text, "attnscale.room.module:Class", to be imported when they are asked for."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and re.fullmatch(r"attnscale(\.\w+)+:\w+", str(node.value)):
            yield node.value.split(".")[1]


def test_only_named_sinks_reach_for_a_room_that_comes_later():
    reaching = {
        (str(path.relative_to(SRC)), later)
        for path in SRC.rglob("*.py")
        for later in named_homes(path)
        if ROOMS.index(later) > ROOMS.index(room(path))
    }
    assert reaching == {("train/sinks/__init__.py", "show")}


def test_training_loads_nothing_that_only_shows():
    code = "import sys, attnscale; attnscale.Monitor; print([n for n in sys.modules if n.startswith('attnscale.show')])"
    assert python(code).strip() == "[]"


def test_the_public_names():
    assert sorted(attnscale.__all__) == [
        "AttnscaleError", "ClipReport", "Finding", "Monitor", "MultiheadAttention", "QKClip", "ScoreMoments",
        "ScoreStats", "Visibility", "attention", "attention_varlen", "attention_varlen_with_stats", "attention_weights",
        "attention_with_stats", "audit", "calibrate_", "clip_qk_", "compare",
        "reference", "rescale_", "rules", "score_moments", "score_stats", "theory", "train", "watch", "what_if",
    ]  # fmt: skip
    assert all(getattr(attnscale, name) is not None for name in attnscale.__all__)
    assert set(attnscale.__all__) <= set(dir(attnscale))
    with pytest.raises(AttributeError, match="no attribute 'attend'"):
        attnscale.attend  # noqa: B018


def test_no_public_function_shares_its_name_with_a_module():
    # importing attnscale.attention, were it a module, would replace the function of that name
    for name in attnscale.__all__:
        exported = getattr(attnscale, name)
        is_module = exported.__class__.__name__ == "module"
        assert is_module or not ((SRC / name).exists() or (SRC / f"{name}.py").exists())


def test_importing_costs_little_and_loads_nothing_heavy(tmp_path):
    code = """
import gc, sys, time
gc.disable()  # a pass over all that torch made takes as long as the import, and belongs to torch
start = time.perf_counter()
import torch
torch_is_there = time.perf_counter()
import attnscale
[getattr(attnscale, name) for name in attnscale.__all__]
print((time.perf_counter() - torch_is_there) / (torch_is_there - start))
heavy = ("transformers", "triton", "tensorboard", "rich", "typer", "safetensors")
print([name for name in heavy if name in sys.modules])
"""
    # compiled once, as installed packages are
    compiled = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(tmp_path)}
    python(code, **compiled)
    runs = (python(code, **compiled).split("\n")[:2] for _ in range(3))
    # of what torch takes: as a ratio, since machines are busy, and by the best of three runs
    heavy = next((heavy for share, heavy in runs if float(share) < 0.25), None)
    assert heavy == "[]"


def test_help_does_not_import_torch():
    code = "import sys; import attnscale.cli; print('torch' in sys.modules, 'numpy' in sys.modules)"
    assert python(code).split() == ["False", "False"]


def test_a_compiled_function_finds_a_name_it_is_the_first_to_use():
    code = """
import attnscale, torch
run = torch.compile(lambda q: attnscale.attention(q, q, q, scale="log_length"), fullgraph=True, backend="eager")
print(run(torch.ones(1, 2, 3, 4)).shape)
"""
    assert python(code).strip() == "torch.Size([1, 2, 3, 4])"
