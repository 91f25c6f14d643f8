"""Is there room for a model? Asked before it is made: a system that runs out ends the process without a word."""

from pathlib import Path

import torch

from attnscale.errors import ModelError

GIB = 2**30
SHARE = 0.8  # of what is free, for weights: running the model takes some too
CGROUP = Path("/sys/fs/cgroup")


def require_room(needed: int, device: str) -> None:
    """Refuse a model whose weights, of so many bytes, do not fit into what is free."""
    free = free_bytes(device)
    if free is not None and not fits(needed, device):
        raise ModelError(
            f"Out of memory: the model's weights take {needed / GIB:,.1f} GiB, and {free / GIB:,.1f} GiB are free "
            f"on {device}, of which they may take {SHARE:.0%}."
        )


def fits(needed: int, device: str) -> bool:
    """Whether weights of so many bytes do."""
    free = free_bytes(device)
    return free is None or needed <= SHARE * free


def free_bytes(device: str) -> int | None:
    """What is free on a device; None where the system does not say."""
    if device.startswith("cuda"):
        return int(torch.cuda.mem_get_info(device)[0])
    told = (_free_of_the_system(), _free_of_the_container(), _free_of_the_process())
    free = [value for value in told if value is not None]
    return min(free) if free else None


def _free_of_the_system() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    kibibytes = [int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    return kibibytes[0] * 1024 if kibibytes else None


def _free_of_the_container() -> int | None:
    try:
        limit = (CGROUP / "memory.max").read_text(encoding="ascii").strip()
        used = int((CGROUP / "memory.current").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return None if limit == "max" else max(int(limit) - used, 0)


def _free_of_the_process() -> int | None:
    """What its own limit on data leaves, `ulimit -d`; None without one."""
    try:
        from resource import RLIM_INFINITY, RLIMIT_DATA, getrlimit

        limit = getrlimit(RLIMIT_DATA)[0]
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    except (ImportError, OSError):  # Windows; a system without /proc
        return None
    used = [int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData:")]
    return max(limit - used[0], 0) if used and limit != RLIM_INFINITY else None
