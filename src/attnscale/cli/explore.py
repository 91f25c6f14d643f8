"""`attnscale explore`: a page to understand √d_k by hand."""

from pathlib import Path
from typing import Annotated
from urllib.parse import quote

import typer

from attnscale.cli.files import require_writable
from attnscale.cli.output import AsJson, print_json, say, tell
from attnscale.extras import require_extra
from attnscale.files import write_whole

PAGE = Path("attnscale-explore.html")


def explore(
    out: Annotated[Path, typer.Option(help="Where to write the page.")] = PAGE,
    view: Annotated[
        str, typer.Option(help="What it shows first, as its address has it: 'd=64&scores=14, 10, 12'.")
    ] = "",
    no_open: Annotated[bool, typer.Option("--no-open", help="Write the page, and leave the browser alone.")] = False,
    json: AsJson = False,
) -> None:
    """Write an interactive page on scores, their scale and their softmax, and open it in the browser.

    One file that needs nothing else: no server, no network. Move d_k, the keys, the spreads, the rule; type your own
    scores; step through the proof. Its address holds the view, so that a view can be sent.

    Example: attnscale explore --out why.html --no-open
    """
    require_extra("report", "The page")
    require_writable(out)
    from rich.console import Console

    with Console(stderr=True).status("writing the page"):  # torch takes a moment to import; no sign in a pipe
        from attnscale.show.explore import explore_page

        write_whole(out, explore_page())
    address = out.resolve().as_uri() + (f"#{quote(view, safe='=&,%')}" if view else "")
    opened = not no_open and _open(address)
    if json:
        print_json({"page": str(out), "address": address, "opened": opened})
    else:
        say(f"The page is {out}\n{address}")
    if not (opened or no_open):
        tell("no browser could be opened here: open the page yourself.")


def _open(address: str) -> bool:
    import webbrowser

    try:
        return webbrowser.open(address)
    except webbrowser.Error:
        return False
