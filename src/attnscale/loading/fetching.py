"""--download: the one way by which anything is fetched."""

from pathlib import Path

from attnscale.errors import SettingError
from attnscale.loading.cache import download, is_name
from attnscale.loading.loaded import Request


def fetch(request: Request) -> None:
    """Fetch what a request names, and the base that it names, where these are names and no paths."""
    names = [name for name in (request.base, request.model) if name is not None and is_name(name)]
    names = [name for name in names if not Path(name).exists()]
    if not names:
        raise SettingError(f"Expected a model's name, as org/name, to --download, got {request.model!r}.")
    for name in names:
        request.report(f"fetching {name}")
        download(name)
