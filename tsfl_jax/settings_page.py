"""All settings as text: for ``tsfl settings`` and docs/settings.md.

The one source is `tsfl_jax.config`; nothing is said here that is not declared there.
"""

import textwrap

from tsfl_jax.components import range_of
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
_TABLE = """\
| setting | default | values | what it is |
|---|---|---|---|
"""


def entry(name: str) -> str:
    """Two or more lines on a setting: name, default, type; help and range."""
    kind, setting = SETTINGS[name]
    text = "; ".join(filter(None, (setting.help, range_of(setting))))
    lines = textwrap.indent(textwrap.fill(text, _COLUMNS - 4), " " * 4)
    return f"--config.{name}={get(Config(), name)!r}  ({kind.__name__})\n{lines}"


def chosen(group: str) -> list[str]:
    """The settings of a section, or the one of that name; "": all.

    Raises:
      UserError: no setting begins with that name.
    """
    names = [n for n in SETTINGS if not group or f"{n}.".startswith(f"{group}.")]
    if not names:
        groups = [*filter(None, dict.fromkeys(n.rpartition(".")[0] for n in SETTINGS))]
        raise UserError(
            f"{group}: there is no such group or setting"
            f"{nearest(group, [*groups, *SETTINGS])} (groups: {', '.join(groups)})"
        )
    return names


def markdown() -> str:
    """The page docs/settings.md."""
    page, section = _HEAD, None
    for name, (kind, setting) in SETTINGS.items():
        group = name.rpartition(".")[0]
        if group != section:
            head = (
                f"{get(Config(), group).__doc__.splitlines()[0]}\n\n" if group else ""
            )
            title = f"`{group}`" if group else "The experiment"
            page += f"\n## {title}\n\n{head}{_TABLE}"
            section = group
        values = range_of(setting) or kind.__name__
        cells = f"`{name}`", f"`{get(Config(), name)!r}`", values, setting.help
        page += (
            f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n"
        )
    return page
