"""What a run of the tests makes once: the first of its processes that asks makes it, the others wait and read it."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from filelock import FileLock


@pytest.fixture(scope="session")
def made_once(tmp_path_factory):
    """`made_once(name, make)`: the folder of that name, which `make(folder)` fills in the first process that asks."""
    own = tmp_path_factory.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own

    def folder_of(name, make):
        folder, unfinished = shared / name, shared / f"{name}-unfinished"
        with FileLock(shared / f"{name}.lock"):
            if not folder.exists():
                shutil.rmtree(unfinished, ignore_errors=True)
                unfinished.mkdir()
                make(unfinished)
                unfinished.rename(folder)
        return folder

    return folder_of


@pytest.fixture(scope="session")
def claims_file(made_once):
    """What `attnscale claims --json` printed: all claims, which take long to recompute and are the same every time."""

    def recompute(folder):
        command = [sys.executable, "-m", "attnscale", "claims", "--json"]
        own = os.environ | {"PYTHONIOENCODING": "utf-8"}
        ran = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", env=own, check=False)
        assert (ran.returncode, ran.stderr) == (0, "")
        (folder / "claims.json").write_text(ran.stdout, encoding="utf-8")

    return made_once("claims", recompute) / "claims.json"


@pytest.fixture(scope="session")
def claims(claims_file):
    """All claims of the ledger."""
    from attnscale.claims import Claim

    return [Claim(**fields) for fields in json.loads(claims_file.read_text(encoding="utf-8"))]


@pytest.fixture
def known_claims(request, monkeypatch):
    """A ledger that looks up what it would recompute."""
    import attnscale.claims

    def ledger(ids=()):
        return [claim for claim in request.getfixturevalue("claims") if not ids or claim.id in ids]

    monkeypatch.setattr(attnscale.claims, "ledger", ledger)
