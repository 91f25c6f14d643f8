"""What can go wrong, as a tree.

    AttnscaleError                  everything this library raises on purpose; a ValueError
    ├── InputError                  tensors that do not fit together; a RuntimeError too, as SDPA raises there
    │   ├── ShapeError
    │   ├── DtypeError              a TypeError too
    │   └── DeviceError
    ├── ModelError                  a model that cannot be loaded, or not be run on an input made for it
    └── SettingError                a scale, a soft-cap or a parameter outside what its formula is defined for
        └── UnknownRuleError

Every message finishes the sentence: what was expected, what came, what to do.
"""


class AttnscaleError(ValueError):
    """Base of every error raised on purpose."""


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


class SettingError(AttnscaleError):
    """A scale, a soft-cap or a parameter outside what its formula is defined for."""


class UnknownRuleError(SettingError):
    """No rule of that name is in the catalogue."""
