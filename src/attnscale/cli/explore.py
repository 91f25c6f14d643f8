"""`attnscale explore`: write an interactive page about √d_k."""

from pathlib import Path
from typing import Annotated
from urllib.parse import quote

import typer

from attnscale.cli.arguments import require_writable
from attnscale.cli.output import AsJson, print_json, print_message, say
from attnscale.extras import require_extra
from attnscale.files import write_whole

PAGE = Path("attnscale-explore.html")


def explore(
    out: Annotated[Path, typer.Option(help="File to write the page to.")] = PAGE,
    view: Annotated[
        str, typer.Option(help="Settings to open the page with, as in its address: 'd=64&scores=14, 10, 12'.")
    ] = "",
    no_open: Annotated[bool, typer.Option("--no-open", help="Do not open the page in the browser.")] = False,
    json: AsJson = False,
) -> None:
    """Write an interactive page on scores, their scale and their softmax, and open it in the browser.

    The page is one self-contained file that needs no server and no network. Drag d_k and compare scales side by side,
    follow the explanation in six steps, run a trained model with and without its scale, and play two recorded training
    runs. The address of the page contains its settings.

    Example: attnscale explore --out why.html --no-open
    """
    require_extra("report", "The page")
    require_writable(out)
    import webbrowser

    from rich.console import Console

    with Console(stderr=True).status("writing the page"):  # importing torch takes a moment
        from attnscale.show.explore import explore_page, require_view

        require_view(view)
        write_whole(out, explore_page())
    address = out.resolve().as_uri() + (f"#{quote(view, safe='=&,%')}" if view else "")
    opened = not no_open and webbrowser.open(address)
    if json:
        print_json({"page": str(out), "address": address, "opened": opened})
    else:
        say(f"The page is in {out}\n{address}")
    if not (opened or no_open):
        print_message("No browser could be opened here; open the page yourself.")
