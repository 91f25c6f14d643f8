"""What can go wrong, as a tree.

    AttnscaleError                  everything this library raises on purpose; a ValueError
    ├── InputError                  tensors that do not fit together; a RuntimeError too, as SDPA raises there
    │   ├── ShapeError
    │   ├── DtypeError              a TypeError too
    │   └── DeviceError
    ├── ModelError                  a model that cannot be loaded, or not be run on an input made for it
    └── SettingError                a scale, a soft-cap or a parameter outside what its formula is defined for; a
        │                           RuntimeError too, as SDPA raises for its dropout
        └── UnknownRuleError

What is told and stops nothing, as a tree:

    AttnscaleWarning                everything this library warns of; a UserWarning
    ├── NotFollowedWarning          operations or modules that watching could not follow, and left out
    ├── NotInsideWarning            attentions that are watched from outside at every step, which costs more
    ├── NotRecordedWarning          a training step, or a part of one, that is not in its record
    ├── LostRankWarning             a rank that did not answer, and is not waited for again
    ├── SinkWarning                 a sink that failed, or a log that could not be written
    └── DamagedFileWarning          a kept result that could not be read, and is computed again

Every message finishes the sentence: what was expected, what came, what to do. Code tells errors and warnings apart by
their classes, never by their words.
"""

from attnscale.plain import printable_lines


class AttnscaleError(ValueError):
    """Base of every error raised on purpose; names of models and logs are told without what steers a terminal."""

    def __str__(self) -> str:
        return printable_lines(super().__str__())


class InputError(AttnscaleError, RuntimeError):
    """The tensors do not fit together."""


class ShapeError(InputError):
    """Ranks, head counts, lengths or dimensions disagree."""


class DtypeError(InputError, TypeError):
    """Dtypes disagree, or are not floating point."""


class DeviceError(InputError):
    """Tensors live on different devices."""


class ModelError(AttnscaleError):
    """A model cannot be loaded, or not be run on an input made for it."""


class SettingError(AttnscaleError, RuntimeError):
    """A scale, a soft-cap or a parameter outside what its formula is defined for."""


class UnknownRuleError(SettingError):
    """No rule of that name is in the catalogue."""


class AttnscaleWarning(UserWarning):
    """Base of every warning given on purpose; told as errors are."""

    def __str__(self) -> str:
        return printable_lines(super().__str__())


class NotFollowedWarning(AttnscaleWarning):
    """Operations or modules that watching could not follow, and left out."""


class NotInsideWarning(AttnscaleWarning):
    """Attention that cannot be measured inside a model's own run, and is watched from outside, which costs more."""


class NotRecordedWarning(AttnscaleWarning):
    """A training step, or a part of one, that is not in its record."""


class LostRankWarning(AttnscaleWarning):
    """A rank that did not answer, and is not waited for again."""


class SinkWarning(AttnscaleWarning):
    """A sink that failed, or a log that could not be written."""


class DamagedFileWarning(AttnscaleWarning):
    """A kept result that could not be read, and is computed again."""
