import pytest
from torch._dynamo.utils import counters


@pytest.fixture(autouse=True)
def no_graph_counted():
    counters.clear()
