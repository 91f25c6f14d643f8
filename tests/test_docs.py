"""What README says of the repository is so; tests/docs runs its code."""

import runpy
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_readme_names_every_room():
    rooms = {path.name for path in (ROOT / "src/attnscale").iterdir() if path.suffix == ".py" or path.is_dir()}
    tree = README.split("src/attnscale/\n")[1].split("```")[0]
    missing = {room for room in rooms if room.removesuffix("/") not in tree and not room.startswith("__")}
    assert not missing


def test_the_picture_shows_what_the_command_prints(tmp_path, capsys):
    runpy.run_path(str(ROOT / "docs/pictures/make.py"))["main"](tmp_path)
    capsys.readouterr()
    assert (tmp_path / "predict.svg").read_bytes() == (ROOT / "docs/pictures/predict.svg").read_bytes()


def test_the_readmes_costs_are_the_recorded_ones():
    assert runpy.run_path(str(ROOT / "benchmarks/table.py"))["table"]() in README
