"""Errors, which are ValueErrors, and warnings, which do not stop the program.

Every message states the expected value, the actual value and the remedy. Code must distinguish errors and warnings by
class, never by message.
"""

from attnscale.plain import printable_lines


class AttnscaleError(ValueError):
    """Base of all errors of attnscale. Control characters in the message are escaped."""

    def __str__(self) -> str:
        return printable_lines(super().__str__())


class InputError(AttnscaleError, RuntimeError):
    """Tensors that do not fit together; a RuntimeError too, as SDPA raises."""


class ShapeError(InputError):
    """Ranks, head counts, lengths or dimensions that disagree."""


class DtypeError(InputError, TypeError):
    """Dtypes that disagree, or are not floating point."""


class DeviceError(InputError):
    """Tensors on different devices."""


class ModelError(AttnscaleError):
    """A model that cannot be loaded, or cannot run on its input."""


class SettingError(AttnscaleError, RuntimeError):
    """A scale, a soft-cap or another setting with an invalid value; a RuntimeError too, as SDPA raises."""


class UnknownRuleError(SettingError):
    """A rule name that is not in the catalogue."""


class AttnscaleWarning(UserWarning):
    """Base of all warnings of attnscale. Control characters in the message are escaped."""

    def __str__(self) -> str:
        return printable_lines(super().__str__())


class NotFollowedWarning(AttnscaleWarning):
    """Operations or modules that could not be traced, and are skipped."""


class NotInsideWarning(AttnscaleWarning):
    """Attention without a probe; sampled steps trace it, which is slower."""


class NotRecordedWarning(AttnscaleWarning):
    """A training step, or a part of one, that was not recorded."""


class LostRankWarning(AttnscaleWarning):
    """A rank that did not answer; records lack its rows."""


class SinkWarning(AttnscaleWarning):
    """A sink that failed, or a log that could not be written."""


class DamagedFileWarning(AttnscaleWarning):
    """A stored result that could not be read; it is computed again."""
