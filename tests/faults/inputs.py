"""Models that would take forever, or all memory: each is refused with status 2 and one sentence."""

import sys

from tests.loading.test_hostile import CONFIGURATIONS
from tests.processes import finished


def configurations(folder):
    survived = 0
    for content, sentence in CONFIGURATIONS.values():
        (folder / "config.json").write_text(content, encoding="utf-8")
        command = [sys.executable, "-m", "attnscale", "check", str(folder / "config.json")]
        done = finished(command, timeout=120)
        survived += done.returncode == 2 and sentence in done.stderr and done.stderr.count("\n") == 1
    return len(CONFIGURATIONS), survived


def options(folder):
    tried = [["--text", "/dev/zero"], ["--length", "1000000000000"], ["\udcff:model"], ["/dev/zero"]]
    survived = 0
    for arguments in tried:
        command = [sys.executable, "-m", "attnscale", "check", *arguments]
        done = finished(command, timeout=120)
        survived += done.returncode == 2 and done.stderr.count("\n") == 1
    return len(tried), survived


FAULTS = {"a hostile configuration is refused": configurations, "a hostile option is refused": options}
