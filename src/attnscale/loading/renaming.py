"""Names of tensors in files that are older than the class that reads them: transformers' own table of both."""

from collections.abc import Iterable
from importlib import import_module
from typing import Any

from torch import nn


def homes_by_new_name(model: nn.Module, stored: Iterable[str]) -> dict[str, str]:
    """The name that a class gives to each stored tensor -> its name in the files.

    What is put together of several tensors, as experts are, has no home in a file and is left out.
    """
    transforms = _transforms(model)
    renamings = [each for each in transforms if not hasattr(each, "operations")]
    converters = [each for each in transforms if hasattr(each, "operations")]
    found = {}
    for home in sorted(stored):
        name = home
        for renaming in renamings:
            name = renaming.rename_source_key(name)[0]
        if all(converter.rename_source_key(name)[1] is None for converter in converters):
            found[name] = home
    return found


def _transforms(model: nn.Module) -> list[Any]:
    try:
        return list(import_module("transformers.conversion_mapping").get_model_conversion_mapping(model))
    except (ImportError, AttributeError):  # another version of transformers: names are taken as they are
        return []
