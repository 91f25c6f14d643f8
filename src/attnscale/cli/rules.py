"""`attnscale rules`: the catalogue."""

from attnscale.cli.output import AsJson, print_json


def rules(json: AsJson = False) -> None:
    """List the scale rules: formula, source, and when to use which.

    Example: attnscale rules --json
    """
    from attnscale.rules.listing import catalogue

    entries = catalogue()
    if json:
        print_json([entry.to_dict() for entry in entries])
        return
    from attnscale.show.listings import show_catalogue

    show_catalogue(entries)
