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
ROOT = Path(__file__).parent.parent

# A room imports only what stands above it. A change that needs more files or lines raises the number here, which
# somebody decides; `goal` is what the room should come to.
BUDGETS = """
room             files  lines   goal
plain                1    110
errors               1     80
results              1     40
extras               1     50
files                1     90
shapes               1     40
numerics             1     80
module_paths         1     50
torch_internals      1    350
reference            1    120
theory               6    600
rules               18    850
visibility           1    240
inputs               1    190
attending            8  1,040   1,100 with operator
operator             1    160
modules              1    240
measure             28  5,480   4,000
declared             4    480
tracing             10  2,020   2,000
watching            19  3,470   2,900
probes               8  1,670
diagnose            13  2,410   2,200
acting               8  1,540
train               15  2,810   2,500
models               4    260
loading              9  1,170   1,300 with checking
checking             2    240
comparing            8  1,290   1,430
bench                4    440   420
lab                 20  2,880   4,500 with claims
claims               9  1,760
show                17  2,490   2,400
cli                 13    930   900
"""
TOTAL = {"src": (239, 35_620), "tests": (244, 30_350)}  # files and lines; goals: src 240 and 31,000, tests 24,000 lines


def budgets():
    for line in BUDGETS.strip().splitlines()[1:]:
        name, files, lines, *_ = line.replace(",", "").split()
        yield name, int(files), int(lines)


ROOMS = tuple(name for name, _, _ in budgets())


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


def test_imports_go_one_way():
    offenders = [
        (str(path.relative_to(SRC)), later)
        for path in SRC.rglob("*.py")
        if room(path) in ROOMS
        for later in imported_rooms(path)
        if later not in ROOMS[: ROOMS.index(room(path)) + 1]
    ]
    assert offenders == []


def size(paths):
    texts = [path.read_text(encoding="utf-8") for path in paths]
    return len(texts), sum(text.count("\n") for text in texts)


def test_every_room_is_within_its_budget():
    by_room = {name: [path for path in SRC.rglob("*.py") if room(path) == name] for name in ROOMS}
    sizes = {name: (*size(by_room[name]), files, lines) for name, files, lines in budgets()}
    over = {name: found for name, found in sizes.items() if found[0] > found[2] or found[1] > found[3]}
    assert over == {}, "files and lines, and at most: remove something, or decide to raise the budget"


@pytest.mark.parametrize("tree", TOTAL)
def test_the_whole_is_within_its_budget(tree):
    files, lines = size((ROOT / tree).rglob("*.py"))
    most_files, most_lines = TOTAL[tree]
    assert (files <= most_files, lines <= most_lines) == (True, True), (files, lines)


def named_homes(path):
    """Classes that a module names as text, "attnscale.room.module:Class", to be imported when they are asked for."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and re.fullmatch(r"attnscale(\.\w+)+:\w+", str(node.value)):
            yield node.value.split(".")[1]


def test_only_sinks_and_results_reach_for_a_room_that_comes_later():
    reaching = {
        (str(path.relative_to(SRC)), later)
        for path in SRC.rglob("*.py")
        for later in named_homes(path)
        if ROOMS.index(later) > ROOMS.index(room(path))
    }
    assert reaching == {("train/sinks.py", "show"), ("results.py", "show")}


def test_training_loads_nothing_that_only_shows():
    code = "import sys, attnscale; attnscale.Monitor; print([n for n in sys.modules if n.startswith('attnscale.show')])"
    assert python(code).strip() == "[]"


def test_the_public_names():
    assert sorted(attnscale.__all__) == [
        "AttnscaleError", "ClipReport", "Finding", "Monitor", "MultiheadAttention", "QKClip", "ScoreMoments",
        "ScoreStats", "Visibility", "attention", "attention_varlen", "attention_varlen_with_stats", "attention_weights",
        "attention_with_stats", "audit", "calibrate_", "clip_qk_", "compare", "compare_backends",
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
