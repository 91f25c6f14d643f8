"""Every layout × kind of attention, clipped on 2 and 4 ranks: replicas equal to the last bit, as in one process."""

import traceback
import warnings

from tests.acting.test_layouts import CASES, clipped_on_ranks, compare

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
    for world in LAYOUTS:
        cases = [case for case in _cases() if case[1] == world]
        for case, ranks in _on_ranks(cases, folder):
            tried += 1
            try:
                assert ranks is not None, "a rank ended before its time"
                compare(case, ranks)
                survived += 1
            except Exception:
                print(f"  {case}\n{traceback.format_exc(limit=2)}")
    return tried, survived


def _on_ranks(cases, folder):
    """Each case with what its ranks hold; all in the same processes, or each in its own where one of them fails."""
    place = folder / f"{cases[0][1]} ranks, {len(cases)} from {len(list(folder.iterdir()))}"
    place.mkdir()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own
            return clipped_on_ranks(cases, place)
    except Exception:
        print(traceback.format_exc(limit=2))
        return [(cases[0], None)] if len(cases) == 1 else [held for case in cases for held in _on_ranks([case], folder)]


FAULTS = {"replicas stay equal after a clip": clipped}
