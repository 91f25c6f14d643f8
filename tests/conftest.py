import atexit
import gc
import logging
import os
import shutil
import sys
import tempfile
import warnings

if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:  # shared by the workers of this run, and by no other version of us
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="attnscale-inductor-")
    atexit.register(shutil.rmtree, os.environ["TORCHINDUCTOR_CACHE_DIR"], ignore_errors=True)
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # else it starts processes, which import torch to compile

import numpy as np
import pytest
import torch
from hypothesis import settings

if torch.cuda.is_available():  # where the first reset imports what warns, and not in the first test that runs
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch._dynamo.reset()

from tests.browser import browser, open_page  # noqa: F401  # fixtures
from tests.once import claims, claims_file, known_claims, made_once  # noqa: F401  # fixtures

gc.set_threshold(50_000)  # with all modules imported, a tenth of the time of compiling went into looking for garbage
for device in (torch.cuda, torch.xpu, torch.mtia):
    if not device.is_available():  # else every seed is kept for it, with the stack of who gave it
        device.manual_seed_all = lambda seed: None
settings.register_profile("attnscale", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("attnscale")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """Keep every so many-th test where TEST_PART says so, as "3/12": processes share tests out without a plugin."""
    part, _, parts = os.environ.get("TEST_PART", "").partition("/")
    if parts:
        items[:] = items[int(part) :: int(parts)]


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
    torch._dynamo.reset()  # or compiled tests share one recompile limit
    logger = logging.getLogger("attnscale")
    level = logger.level
    yield
    logger.setLevel(level)  # a page of the documentation silences it


@pytest.fixture(autouse=True)
def _rows_drawn_anew():
    """The rows that are sampled follow from the test alone, not from which ones ran before it."""
    sampling, drawn = (sys.modules.get(f"attnscale.measure.{name}") for name in ("sampling", "cuda.sampled"))
    if sampling is not None:
        sampling.SOURCE.bit_generator.state = np.random.default_rng(0).bit_generator.state
    if drawn is not None:
        drawn.drawn_ahead.cache_clear()


@pytest.fixture(autouse=True)
def _unwatched():
    """A monitor that a test leaves open would go on watching in the next one."""
    yield
    monitors = sys.modules.get("attnscale.train.monitor")
    for monitor in [] if monitors is None else list(monitors.OPEN):
        monitor.close()
