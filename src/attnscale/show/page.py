"""What every page shares: it fetches nothing, its scripts run by their hash, and names in it are data."""

import base64
import hashlib
import json

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from attnscale.plain import printable_lines


def pages() -> Environment:
    """The templates, where everything that is not marked as code is escaped, for a page and for a reader."""
    made = Environment(loader=PackageLoader("attnscale.show"), autoescape=True, undefined=StrictUndefined)
    made.trim_blocks = made.lstrip_blocks = True
    made.finalize = _shown
    return made


def _shown(value: object) -> object:
    """What a template shows; text without marks that turn its direction, which names may bring."""
    return printable_lines(value) if type(value) is str else value


def source(templates: Environment, *names: str) -> str:
    """Files among the templates as they are, one after the other."""
    assert templates.loader is not None
    return "\n".join(templates.loader.get_source(templates, name)[0] for name in names)


def code(script: str) -> Markup:
    """Code of ours, to stand in a script element."""
    return Markup(script.replace("</script", "<\\/script"))


def data(value: object) -> Markup:
    """JSON to stand in a script element, which ends at the first `</script` whatever surrounds it."""
    written = json.dumps(value, allow_nan=False)
    return Markup(written.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))


def policy(*scripts: str) -> str:
    """Nothing is fetched; only these scripts run. A report paints its maps into images."""
    hashes = (base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii") for script in scripts)
    allowed = " ".join(f"'sha256-{value}'" for value in hashes)
    own = "style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; form-action 'none'"
    return f"default-src 'none'; script-src {allowed}; {own}"
