"""Paths of a model's modules without what wrappers add to them, so that a layer has one name under every wrapper."""

from torch import nn

# Attributes in which DDP, torch.compile, FSDP1 and activation checkpointing hold the module that they wrap.
WRAPPED = frozenset(("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"))
OFTEN_A_USERS_OWN = "module"  # removed only where it is the one child of its parent


def without_wrappers(path: str) -> str:
    """Return a path, of a module or a parameter, without the parts that wrappers add.

    >>> without_wrappers("module.layers.0._orig_mod.attention")
    'layers.0.attention'
    """
    return ".".join(part for part in path.split(".") if part not in WRAPPED)


def modules_by_path(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of a model by their path without wrappers; what is wrapped stands for its wrapper.

    Modules that would share a path keep their full ones.
    """
    full = dict(model.named_modules())
    sharing: dict[str, list[str]] = {}
    for path in full:
        sharing.setdefault(_short(path, full), []).append(path)
    found = {}
    for short, paths in sharing.items():
        innermost = paths[-1]
        if all(f"{innermost}.".startswith(f"{path}." if path else "") for path in paths):
            found[short] = full[innermost]
        else:
            found |= {path: full[path] for path in paths}
    return found


def _short(path: str, modules: dict[str, nn.Module]) -> str:
    parts = path.split(".")
    kept = [part for at, part in enumerate(parts) if not _is_wrapped(modules[".".join(parts[:at])], part)]
    return ".".join(kept)


def _is_wrapped(parent: nn.Module, name: str) -> bool:
    return name in WRAPPED and (name != OFTEN_A_USERS_OWN or len(list(parent.children())) == 1)
