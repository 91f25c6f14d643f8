"""Nothing is fetched: whatever a configuration names, no hub is asked for it."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# Read when huggingface_hub and transformers are imported: the hub off, and the kernels it would serve as code.
SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "USE_HUB_KERNELS": "NO",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}


@contextmanager
def offline() -> Iterator[None]:
    """Keep Hugging Face's libraries off the network, whether they are imported already or only within."""
    before = {name: os.environ.get(name) for name in SETTINGS}
    os.environ.update(SETTINGS)
    hub = sys.modules.get("huggingface_hub.constants")
    was_offline = getattr(hub, "HF_HUB_OFFLINE", None)
    if hub is not None:
        hub.HF_HUB_OFFLINE = True  # type: ignore[attr-defined]  # what every request looks at
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        if hub is not None:
            hub.HF_HUB_OFFLINE = was_offline  # type: ignore[attr-defined]
