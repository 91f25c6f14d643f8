"""The layers that a watched model should show, and no other."""


def found_layers(seen, expected):
    """The expected layers, each under its own path or that of a module inside it, and no other."""
    found = {}
    for path in expected.layers:
        names = [name for name in seen.layers if name == path or name.startswith(f"{path}.")]
        assert len(names) == 1, f"expected one layer at {path}, got {names} of {list(seen.layers)}"
        found[path] = seen.layers[names[0]]
    assert len(seen.layers) == len(found), f"expected {list(found)}, got {list(seen.layers)}"
    return found
