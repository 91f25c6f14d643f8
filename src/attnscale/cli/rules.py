"""`attnscale rules`: list the scale rules."""

from attnscale.cli.output import AsJson, print_json


def rules(json: AsJson = False) -> None:
    """List the scale rules with formula, source, and when to use each.

    Example: attnscale rules --json
    """
    from attnscale.rules.listing import catalogue

    entries = catalogue()
    if json:
        print_json([entry.to_dict() for entry in entries])
        return
    from attnscale.show.listings import show_catalogue

    show_catalogue(entries)
