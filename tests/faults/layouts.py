"""Every layout × kind of attention, clipped on 2 and 4 ranks: replicas equal to the last bit, as in one process."""

import traceback
import warnings

from tests.acting.test_layouts import CASES, held_to_one_process

LAYOUTS = {2: ("tp", "ddp", "inside ddp", "fsdp"), 4: ("tp", "ddp", "fsdp", "fsdp x tp", "hsdp x", "ddp x tp")}
KINDS = ("plain", "normed", "gains")
BATCHES = {"tp": 1, "fsdp x tp": 2, "ddp x tp": 2}  # each rank has its own, but for those that share their heads out


def _cases():
    yield from CASES.values()
    for world, layouts in LAYOUTS.items():
        for layout in layouts:
            for kind in KINDS:
                yield layout, world, kind, 4, 4, list(range(BATCHES.get(layout, world))), ()


def clipped(folder):
    tried = survived = 0
    for case in _cases():
        place = folder / str(tried)
        place.mkdir()
        tried += 1
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's own
                held_to_one_process([case], place)
            survived += 1
        except Exception:
            print(f"  {case}\n{traceback.format_exc(limit=2)}")
    return tried, survived


FAULTS = {"replicas stay equal after a clip": clipped}
