"""Libraries that warn of themselves, differently from version to version; what attnscale warns of stays an error."""

import pytest

OTHERS_MAY_WARN = pytest.mark.filterwarnings("default", "error::attnscale.errors.AttnscaleWarning")
