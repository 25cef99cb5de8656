"""Writes docs/settings.md: ``python docs/settings_page.py``."""

import pathlib

from tsfl_jax.components import range_of
from tsfl_jax.config import SETTINGS, Config, get

_HEAD = """\
# Settings

Each setting can be changed on the command line, `--config.lr=0.01`, in a
file of `configs/`, or in Python, `config.lr = 0.01`. `tsfl settings` prints
this list and `tsfl settings data` one section. This page is made from
`tsfl_jax.Config` by `python docs/settings_page.py`.
"""
_TABLE = """\
| setting | default | values | what it is |
|---|---|---|---|
"""


def markdown() -> str:
    """The page as text."""
    page, section = _HEAD, None
    for name, (kind, setting) in SETTINGS.items():
        group = name.rpartition(".")[0]
        if group != section:
            doc = get(Config(), group).__doc__.splitlines()[0] if group else ""
            title = f"`{group}`" if group else "The experiment"
            page += f"\n## {title}\n\n" + f"{doc}\n\n" * bool(doc) + _TABLE
            section = group
        values = range_of(setting) or kind.__name__
        cells = f"`{name}`", f"`{get(Config(), name)!r}`", values, setting.help
        row = " | ".join(cell.replace("|", r"\|") for cell in cells)
        page += f"| {row} |\n"
    return page


if __name__ == "__main__":
    path = pathlib.Path(__file__).with_name("settings.md")
    path.write_text(markdown(), encoding="utf-8")
