"""Portrait: what every head of a model does, sample by sample, so that another can be held against it."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from attnscale.diagnose.finding import Finding

Numbers = NDArray[np.float64]
# What is compared: as ratios, or, what lies between 0 and 1, as differences.
RATIOS = ("spread", "scale", "query_norm", "key_norm", "alignment", "query_gradient", "key_gradient")
SHARES = ("entropy_ratio", "gradient_gain")
COMPARED = (*RATIOS[:5], *SHARES, *RATIOS[5:])


@dataclass(frozen=True)
class LayerPortrait:
    """One layer: numbers (samples, heads) by the name of their statistic, NaN where there is none."""

    samples: Mapping[str, Numbers]
    made: tuple[str, ...] = ()  # a head: by what its queries and keys are made, as a digest; empty where unknown

    @property
    def heads(self) -> int:
        """How many."""
        return next((int(numbers.shape[1]) for numbers in self.samples.values()), 0)

    @property
    def count(self) -> int:
        """Of samples."""
        return next((int(numbers.shape[0]) for numbers in self.samples.values()), 0)


@dataclass(frozen=True)
class Portrait:
    """A model on several sequences, or the latest records of a run."""

    title: str
    fed: str  # what the samples are, in words
    layers: Mapping[str, LayerPortrait]
    findings: tuple[Finding, ...] = ()
    inputs: str = ""  # what it was run on, as a digest: samples of the same inputs are compared one by one
    notes: tuple[str, ...] = ()
