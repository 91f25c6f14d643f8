"""Logs of any size, written without making all of their records."""

from attnscale.measure.statistics import logged
from attnscale.train import LayerRecord, Record
from attnscale.train.line import line_of

LAYERS, HEADS = 12, 12


def large_log(path, size):
    """A log of about so many bytes: a run of GPT-2-small's shape, some 20 kB a record."""
    layers = {
        f"blocks.{layer}.attention": LayerRecord(
            64 * HEADS, {name: [round(0.1 + 0.0137 * (layer + head), 4) for head in range(HEADS)] for name in logged()}
        )
        for layer in range(LAYERS)
    }
    before, after = line_of(Record(987654321, 1e9, layers, run="large", part="one")).split(b"987654321")
    with path.open("wb") as file:
        step = 0
        while file.tell() < size:
            file.write(before + str(50 * step).encode() + after)
            step += 1
    return path
