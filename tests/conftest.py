import logging

import pytest
import torch
from hypothesis import settings

from tests.browser import browser, open_page  # noqa: F401  # fixtures

settings.register_profile("attnscale", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("attnscale")


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
    torch._dynamo.reset()  # or compiled tests share one recompile limit
    logger = logging.getLogger("attnscale")
    level = logger.level
    yield
    logger.setLevel(level)  # a page of the documentation silences it
