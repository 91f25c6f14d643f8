import os
import stat

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
def test_what_is_no_file_is_written_to_and_not_replaced(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_whole(pipe, "√")
    assert os.read(reader, 10).decode("utf-8") == "√"
    os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)


@pytest.mark.parametrize("place", ["missing/file", "file/file"])
def test_a_place_that_cannot_be_written_is_one_sentence(tmp_path, place):
    (tmp_path / "file").write_text("old")
    with pytest.raises(SettingError, match="Could not write"):
        write_whole(tmp_path / place, "new")
    assert (tmp_path / "file").read_text() == "old"
