"""`attnscale claims`: recompute what articles claim about √d_k."""

from typing import Annotated

import typer

from attnscale.cli.output import AsJson, print_json, print_message


def claims(
    ids: Annotated[list[str] | None, typer.Argument(help="Ids of the claims to show; all claims by default.")] = None,
    verdict: Annotated[
        str | None, typer.Option(help="Show only claims with this verdict: confirmed, refuted or qualified.")
    ] = None,
    index: Annotated[
        bool, typer.Option("--index", help="Show the command for every exercise, listing and worked example instead.")
    ] = False,
    record: Annotated[bool, typer.Option("--record", help="Record these verdicts for later comparisons.")] = False,
    json: AsJson = False,
) -> None:
    """Recompute what four articles claim about √d_k, and show which claims hold.

    Some claims are measured by training small models; all claims together take half a minute. The exit status is 1 if a
    verdict differs from the recorded one.

    Example: attnscale claims --verdict refuted
    """
    from dataclasses import asdict

    from attnscale.claims import INDEX, VERDICTS, changed, ledger
    from attnscale.errors import SettingError

    if verdict is not None and verdict not in VERDICTS:
        raise SettingError(f"Unknown verdict {verdict!r}. Expected one of: {', '.join(VERDICTS)}.")
    if (ids or verdict) and record:
        raise SettingError("Expected --record without ids and --verdict: it records the verdicts of all claims.")
    if index:
        from attnscale.show.listings import show_index

        print_json([asdict(worked) for worked in INDEX]) if json else show_index()
        return
    from rich.console import Console

    with Console(stderr=True).status("recomputing"):  # draws nothing if stderr is not a terminal
        everything = ledger(ids or ())
    shown = [claim for claim in everything if verdict in (None, claim.verdict)]
    if json:
        print_json([asdict(claim) for claim in shown])
    else:
        from attnscale.show.listings import show_ledger

        show_ledger(shown)
    differences = changed(everything, whole=not ids)
    for difference in differences:
        print_message(difference)
    if record:
        from attnscale.claims import record as keep

        keep(everything)
        print_message(
            f"Recorded the verdicts of {len(everything)} claims; {len(differences)} are new, changed or gone."
        )
    raise typer.Exit(1 if differences and not record else 0)
