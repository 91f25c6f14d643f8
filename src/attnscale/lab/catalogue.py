"""The experiments, by name."""

from attnscale.lab.experiment import Experiment
from attnscale.lab.experiments import (
    ablation,
    divisors,
    gradients,
    growth,
    initialisation,
    length,
    saturation,
    temperature,
    trained,
    variance,
)

ROOMS = (variance, saturation, divisors, gradients, initialisation, length, ablation, temperature, growth, trained)
EXPERIMENTS: dict[str, Experiment] = {room.EXPERIMENT.name: room.EXPERIMENT for room in ROOMS}
