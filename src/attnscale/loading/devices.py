"""Which devices are here."""

import torch

from attnscale.errors import SettingError


def require_device(device: str) -> None:
    """Refuse a device that is not here, before any work."""
    kind = device.partition(":")[0]
    here = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    try:
        if not here.get(kind):
            raise RuntimeError
        torch.zeros(1, device=device)
    except RuntimeError:
        known = ", ".join(name for name, is_here in here.items() if is_here)
        raise SettingError(f"Expected a device that is here ({known}), got {device!r}.") from None
