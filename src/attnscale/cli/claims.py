"""`attnscale claims`: what is said about √d_k, recomputed."""

from typing import Annotated

import typer

from attnscale.cli.output import AsJson, print_json, tell


def claims(
    verdict: Annotated[str | None, typer.Option(help="Show only one verdict: confirmed, refuted or qualified.")] = None,
    json: AsJson = False,
) -> None:
    """Recompute what four articles claim about √d_k, and say which claims hold.

    Ends with status 1 if a verdict differs from the recorded one.
    """
    from dataclasses import asdict

    from attnscale.claims import VERDICTS, changed, ledger
    from attnscale.errors import SettingError

    if verdict is not None and verdict not in VERDICTS:
        raise SettingError(f"Unknown verdict {verdict!r}. Expected one of: {', '.join(VERDICTS)}.")
    everything = ledger()
    shown = [claim for claim in everything if verdict in (None, claim.verdict)]
    if json:
        print_json([asdict(claim) for claim in shown])
    else:
        from attnscale.show.ledger import show_ledger

        show_ledger(shown)
    differences = changed(everything)
    for difference in differences:
        tell(difference)
    raise typer.Exit(1 if differences else 0)
