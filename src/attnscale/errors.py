"""Errors and warnings.

    AttnscaleError                  base of every error raised on purpose; a ValueError
    ├── InputError                  tensors that do not fit together; a RuntimeError too, as SDPA raises there
    │   ├── ShapeError
    │   ├── DtypeError              a TypeError too
    │   └── DeviceError
    ├── ModelError                  a model that cannot be loaded, or not run on its input
    └── SettingError                a scale, a soft-cap or a parameter outside what its formula is defined for; a
        │                           RuntimeError too, as SDPA raises for its dropout
        └── UnknownRuleError

Warnings, which stop nothing:

    AttnscaleWarning                base of every warning given on purpose; a UserWarning
    ├── NotFollowedWarning          operations or modules that could not be followed, and are left out
    ├── NotInsideWarning            attention without a probe, which is traced at every sampled step and costs more
    ├── NotRecordedWarning          a training step, or a part of one, that is not in its record
    ├── LostRankWarning             a rank that did not answer, whose rows are missing
    ├── SinkWarning                 a sink that failed, or a log that could not be written
    └── DamagedFileWarning          a stored result that could not be read, and is computed again

Every message says what was expected, what was found, and what to do. Code tells errors and warnings apart by their
classes, never by their messages.
"""

from attnscale.plain import printable_lines


class AttnscaleError(ValueError):
    """Base of every error raised on purpose. Control characters in its message are escaped."""

    def __str__(self) -> str:
        return printable_lines(super().__str__())


class InputError(AttnscaleError, RuntimeError):
    """Tensors that do not fit together."""


class ShapeError(InputError):
    """Ranks, head counts, lengths or dimensions that disagree."""


class DtypeError(InputError, TypeError):
    """Dtypes that disagree, or are not floating point."""


class DeviceError(InputError):
    """Tensors on different devices."""


class ModelError(AttnscaleError):
    """A model that cannot be loaded, or not run on its input."""


class SettingError(AttnscaleError, RuntimeError):
    """A scale, a soft-cap or a parameter outside what its formula is defined for."""


class UnknownRuleError(SettingError):
    """A name that is not in the catalogue of rules."""


class AttnscaleWarning(UserWarning):
    """Base of every warning given on purpose. Control characters in its message are escaped."""

    def __str__(self) -> str:
        return printable_lines(super().__str__())


class NotFollowedWarning(AttnscaleWarning):
    """Operations or modules that could not be followed, and are left out."""


class NotInsideWarning(AttnscaleWarning):
    """Attention without a probe, which is traced at every sampled step and costs more."""


class NotRecordedWarning(AttnscaleWarning):
    """A training step, or a part of one, that is not in its record."""


class LostRankWarning(AttnscaleWarning):
    """A rank that did not answer, whose rows are missing from records."""


class SinkWarning(AttnscaleWarning):
    """A sink that failed, or a log that could not be written."""


class DamagedFileWarning(AttnscaleWarning):
    """A stored result that could not be read, and is computed again."""
