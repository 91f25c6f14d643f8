"""The experiments of the lab, one question a file; EXPERIMENTS lists them by name."""

from attnscale.lab.experiment import Experiment
from attnscale.lab.experiments import (
    ablation,
    divisors,
    entropy_bound,
    gradients,
    initialisation,
    kappa,
    length,
    saturation,
    temperature,
    trained,
    variance,
)

FILES = (
    variance, saturation, divisors, gradients, initialisation, length, entropy_bound, ablation, kappa, temperature,
    trained,
)  # fmt: skip
EXPERIMENTS: dict[str, Experiment] = {file.EXPERIMENT.name: file.EXPERIMENT for file in FILES}
