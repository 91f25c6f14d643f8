"""The experiments, by name."""

from attnscale.lab.experiment import Experiment
from attnscale.lab.experiments import variance

EXPERIMENTS: dict[str, Experiment] = {found.EXPERIMENT.name: found.EXPERIMENT for found in (variance,)}
