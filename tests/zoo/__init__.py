"""Attention as people write it: correct, and with a bug each. What watching and auditing are held to.

Modules named designs_of_… hold attention that is unusual and right, bugs_of_… wrong ones. `reported`, `reported_norms`
and `reported_ports` hold bugs that people reported, each with its fixed twin; all other modules hold correct attention.
"""

import pkgutil
from importlib import import_module

from .bases import recording
from .entry import ENTRIES, Entry, Expected

FAMILIES = {
    found.name: import_module(f"{__name__}.{found.name}")
    for found in pkgutil.iter_modules(__path__)
    if found.name not in ("bases", "entry")
}
CORRECT = {name: entry for name, entry in ENTRIES.items() if entry.code is None}
BUGS = {name: entry for name, entry in ENTRIES.items() if entry.code is not None}

__all__ = ["BUGS", "CORRECT", "ENTRIES", "FAMILIES", "Entry", "Expected", "recording"]
