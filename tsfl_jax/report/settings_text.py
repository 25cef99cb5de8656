"""All settings as text: for ``tsfl settings`` and docs/settings.md.

The one source is `tsfl_jax.config`; nothing is said here that is not declared there.
"""

import math
import textwrap

from tsfl_jax.config import SETTINGS, Config, get
from tsfl_jax.types import UserError, nearest

_COLUMNS = 99  # of a terminal
_HEAD = """\
# Settings

Each setting can be changed on the command line, `--config.lr=0.01`, in a
file of `configs/`, or in Python, `config.lr = 0.01`. `tsfl settings` prints
this list and `tsfl settings data` one section. This page is made from
`tsfl_jax.Config` by `tsfl settings --markdown > docs/settings.md`.
"""
_TABLE = """
| setting | default | values | what it is |
|---|---|---|---|
"""


def range_of(name: str) -> str:
    """The choices or bounds of a setting as text, "" if there are none."""
    _, known = SETTINGS[name]
    if known.choices:
        return ", ".join(known.choices)
    bounds = {"≥": known.low, ">": known.above, "≤": known.high, "<": known.below}
    limits = [f"{sign} {b:,.10g}" for sign, b in bounds.items() if math.isfinite(b)]
    return " and ".join(limits)


def entry(name: str) -> str:
    """Two or more lines on a setting: name, default, type; help and range."""
    kind, known = SETTINGS[name]
    about = "; ".join(filter(None, (known.help, range_of(name))))
    lines = textwrap.indent(textwrap.fill(about, _COLUMNS - 4), " " * 4)
    return f"--config.{name}={get(Config(), name)!r}  ({kind.__name__})\n{lines}"


def chosen(group: str) -> list[str]:
    """The settings of a section, or the one of that name; "": all.

    Raises:
      UserError: no setting begins with that name.
    """
    found = [n for n in SETTINGS if not group or f"{n}.".startswith(f"{group}.")]
    if not found:
        groups = [*filter(None, dict.fromkeys(n.rpartition(".")[0] for n in SETTINGS))]
        raise UserError(
            f"{group}: there is no such group or setting"
            f"{nearest(group, [*groups, *SETTINGS])} (groups: {', '.join(groups)})"
        )
    return found


def markdown() -> str:
    """The page docs/settings.md."""
    page, last = _HEAD, None
    for name, (kind, known) in SETTINGS.items():
        group = name.rpartition(".")[0]
        if group != last:
            about = f"{get(Config(), group).__doc__.splitlines()[0]}\n" if group else ""
            title = f"`{group}`" if group else "The experiment"
            page += f"\n## {title}\n{about and chr(10) + about}{_TABLE}"
            last = group
        default, values = f"`{get(Config(), name)!r}`", range_of(name) or kind.__name__
        cells = " | ".join(
            text.replace("|", "\\|")
            for text in (f"`{name}`", default, values, known.help)
        )
        page += f"| {cells} |\n"
    return page
