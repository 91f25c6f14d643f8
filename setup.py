"""What pyproject.toml cannot say: the readme for the package index, where paths would lead nowhere."""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
REPOSITORY = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Repository"]
PATH = re.compile(r"(!?)(\[[^\]]*\]\()(?!\w+:|#)(?=\S+\))")  # of a picture or a link, before it: ![alt]( or [text](


def with_addresses(readme: str) -> str:
    """Return the text with every path behind the address of the repository."""
    return PATH.sub(lambda found: f"{found[0]}{REPOSITORY}/{'raw' if found[1] else 'blob'}/HEAD/", readme)


setup(
    long_description=with_addresses((ROOT / "README.md").read_text(encoding="utf-8")),
    long_description_content_type="text/markdown",
)
