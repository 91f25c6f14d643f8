"""Models by name: from a cache made by hand, with two revisions; nothing is fetched unless asked for."""

import json
import socket
import threading

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from attnscale.errors import ModelError
from attnscale.loading import Request, load_model
from attnscale.loading.hub import is_name
from tests.cli.running import in_a_process, run

OLD, NEW = "a" * 40, "b" * 40


@pytest.fixture
def hub(saved_bert, tmp_path, monkeypatch):
    """A cache as huggingface_hub lays it out: blobs, links to them by revision, and what `main` stands for."""
    model = tmp_path / "hub" / "models--some--bert"
    (model / "blobs").mkdir(parents=True)
    for commit, factor in ((OLD, 1.0), (NEW, 3.0)):
        folder = model / "snapshots" / commit
        folder.mkdir(parents=True)
        tensors = load_file(saved_bert / "model.safetensors")
        queries = [name for name in tensors if "query" in name]
        save_file(tensors | {name: tensors[name] * factor for name in queries}, model / "blobs" / f"weights-{commit}")
        (model / "blobs" / f"config-{commit}").write_bytes((saved_bert / "config.json").read_bytes())
        (folder / "model.safetensors").symlink_to(f"../../blobs/weights-{commit}")
        (folder / "config.json").symlink_to(f"../../blobs/config-{commit}")
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(NEW, encoding="ascii")
    (model / "refs" / "old").write_text(OLD, encoding="ascii")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return model


@pytest.fixture
def listener():
    """A server that answers nobody, and counts who comes."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        came = []

        def wait():
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                came.append(connection)
                connection.close()

        threading.Thread(target=wait, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}", came


def query_of(loaded):
    return next(tensor for name, tensor in loaded.model.named_parameters() if name.endswith("query.weight"))


def test_a_name_is_the_revision_that_main_stands_for(hub):
    new, old = (query_of(load_model(Request(name))) for name in ("some/bert", "some/bert@old"))
    torch.testing.assert_close(new, 3 * old)
    torch.testing.assert_close(query_of(load_model(Request(f"some/bert@{NEW}"))), new)


def test_a_command_reads_the_cache_without_the_network(hub, listener):
    address, came = listener
    cache = {"HF_HUB_CACHE": str(hub.parent), "HF_ENDPOINT": address}
    ended = in_a_process("check", "some/bert", "--json", **cache)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["model"] == "BertForMaskedLM from some/bert"
    missing = in_a_process("check", "some/other", **cache)
    assert missing.returncode == 2
    assert "no model 'some/other' in the local Hugging Face cache. Add --download to fetch it" in missing.stderr
    assert not came
    asked = in_a_process("check", "some/other", "--download", **cache)
    assert asked.returncode == 2
    assert asked.stderr.startswith("attnscale: Could not fetch some/other: ")
    assert len(asked.stderr.splitlines()) == 1
    assert came


def test_two_revisions_of_a_name_can_be_compared(hub):
    ended = run("compare", "some/bert@old", "some/bert", "--json")
    found = json.loads(ended.stdout)
    assert len(found["changed"]) == 8
    assert found["heads"][0]["moves"]["query_norm"]["change"] == pytest.approx(1.0986, abs=0.02)


def test_a_revision_that_is_not_cached_is_refused(hub):
    with pytest.raises(ModelError, match="no model 'some/bert' at revision 'newer' in the local Hugging Face cache"):
        load_model(Request("some/bert@newer"))


@pytest.mark.parametrize("spec", ["../some", "some/../bert", "/some/bert", "a/b/c", "some/bert@../../x", "", "a:b"])
def test_a_path_is_not_a_name(spec):
    assert not is_name(spec)


def test_a_reference_that_leads_elsewhere_is_not_followed(hub):
    (hub / "refs" / "main").write_text("../../../..", encoding="ascii")
    with pytest.raises(ModelError, match="Add --download"):
        load_model(Request("some/bert"))


def test_download_needs_a_name(bert):
    ended = run("check", bert, "--download")
    assert ended.returncode == 2
    assert "as org/name, with --download" in ended.stderr
