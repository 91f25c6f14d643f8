"""Make the pictures of README and docs from real runs: `make pictures`."""

from pathlib import Path

from rich.console import Console

from attnscale.show.listings import show_prediction
from attnscale.theory import predict

HERE = Path(__file__).parent
COMMAND = "attnscale predict --d-model 768 --heads 12 --init xavier --length 1024"
# rich's own template fetches a font from a network; a reader's monospace font serves.
TEMPLATE = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img"
 aria-label="What attnscale predict prints">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace;
font-size: {char_height}px; line-height: {line_height}px; font-variant-east-asian: full-width; }}
{styles}
</style>
<defs><clipPath id="{unique_id}-clip-terminal"><rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/>
</clipPath>{lines}</defs>
<rect width="{width}" height="{height}" rx="8" fill="#1c1e26"/>
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}<g class="{unique_id}-matrix">{matrix}</g></g>
</svg>
"""


def main(folder: Path = HERE) -> None:
    """Record what `attnscale predict` prints for a Xavier-initialised model as an SVG."""
    console = Console(record=True, width=80, force_terminal=True, color_system="truecolor")
    console.print(f"[dim]$[/dim] {COMMAND}", highlight=False)
    show_prediction(predict(768, 12, 1024, initialisation="xavier"), console)
    svg = console.export_svg(code_format=TEMPLATE, unique_id="predict")
    (folder / "predict.svg").write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
