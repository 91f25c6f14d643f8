import os
import stat
from concurrent.futures import ThreadPoolExecutor

import pytest

from attnscale.errors import SettingError
from attnscale.files import write_whole


def test_a_link_is_followed_and_stays_a_link(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "file")
    write_whole(tmp_path / "link", "√")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text(encoding="utf-8") == "√"
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["file", "link"]  # no part is left


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes with a name")
def test_a_named_pipe_is_written_to_and_not_replaced(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_whole(pipe, "√")
    assert os.read(reader, 10).decode("utf-8") == "√"
    os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)


@pytest.mark.parametrize("place", ["missing/file", "file/file"])
def test_a_place_that_cannot_be_written_is_one_sentence(tmp_path, place):
    (tmp_path / "file").write_text("old", encoding="utf-8")
    with pytest.raises(SettingError, match="Could not write"):
        write_whole(tmp_path / place, "new")
    assert (tmp_path / "file").read_text(encoding="utf-8") == "old"


@pytest.mark.skipif(os.name == "nt", reason="needs a umask")
def test_a_file_has_the_permissions_of_the_umask_which_is_never_touched(tmp_path, monkeypatch):
    before = os.umask(0o027)
    try:
        monkeypatch.setattr(os, "umask", lambda mask: pytest.fail("the umask is the whole process's"))
        write_whole(tmp_path / "file", "text")
        assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o640
    finally:
        monkeypatch.undo()
        os.umask(before)


def test_many_threads_write_whole_files(tmp_path):
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda number: write_whole(tmp_path / f"{number % 3}", f"{number}" * 1000), range(200)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2"]
    assert len({path.read_text(encoding="utf-8")[:1000] for path in tmp_path.iterdir()}) == 3
