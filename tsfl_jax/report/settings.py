"""All settings as text: for ``--help``, ``tsfl settings`` and docs/settings.md.

The one source is `tsfl_jax.config`; nothing is said here that is not declared there,
but for the names of the rules, which are the keys of `AGGREGATORS`.
"""

import dataclasses
import math
import textwrap
from collections.abc import Iterable
from typing import NamedTuple

from tsfl_jax.config import SETTINGS, Config, get
from tsfl_jax.rules import AGGREGATORS
from tsfl_jax.types import UserError, nearest

_COLUMNS = 99  # of a terminal
_FLAG = 22  # columns of a flag's name
# What most runs change, in the order in which one thinks of it; the others are
# listed by `tsfl settings`.
COMMON = (
    "algorithm",
    "data.name",
    "data.dir",
    "model.name",
    "partition.kind",
    "partition.alpha",
    "schedule.kind",
    "schedule.data_size",
    "timeline.framework",
    "num_clients",
    "num_intervals",
    "lr",
    "momentum",
    "batch_size",
    "seed",
    "devices",
)


def range_of(name: str) -> str:
    """The choices or bounds of a setting as text, "" if there are none."""
    _, known = SETTINGS[name]
    choices = tuple(AGGREGATORS) if name == "algorithm" else known.choices
    if choices:
        return ", ".join(choices)
    bounds = {"≥": known.low, ">": known.above, "≤": known.high, "<": known.below}
    limits = [f"{sign} {b:,.10g}" for sign, b in bounds.items() if math.isfinite(b)]
    return " and ".join(limits)


def entry(name: str) -> str:
    """Two or more lines on a setting: name, default, type; help and range."""
    kind, known = SETTINGS[name]
    about = "; ".join(filter(None, (known.help, range_of(name))))
    indent = " " * 4
    text = textwrap.fill(
        about, _COLUMNS, initial_indent=indent, subsequent_indent=indent
    )
    return f"--config.{name}={get(Config(), name)!r}  ({kind.__name__})\n{text}"


class Flag(NamedTuple):
    """A flag of the command line."""

    name: str
    choices: tuple[str, ...]
    help: str
    default: str | int | float | None


def _flag_entry(flag: Flag) -> str:
    default = f" (default: {flag.default})" if flag.default else ""
    indent = " " * _FLAG
    text = textwrap.fill(
        f"{flag.help}{default}",
        _COLUMNS,
        initial_indent=indent,
        subsequent_indent=indent,
    )
    head = f"  --{flag.name}={'|'.join(flag.choices) or '…'}"
    if len(head) < _FLAG:
        return f"{head:<{_FLAG}}{text.lstrip()}"
    return f"{head}\n{text}"


class Command(NamedTuple):
    """A command that trains or explains."""

    usage: str  # its arguments
    about: str  # a sentence
    example: str
    flags: tuple[str, ...]  # its own; it takes those of the other commands, too


_OWN = "[--config=NAME] [--config.SETTING=VALUE …] [--workdir=FOLDER]"
COMMANDS = {
    "run": Command(
        _OWN,
        "Train one experiment. The same command with the same --workdir resumes it.",
        "tsfl run --config=mnist_case1 --config.lr=0.01 --workdir=runs/mnist",
        (
            *("config", "workdir"),
            *("processes", "process", "coordinator", "join_timeout"),
        ),
    ),
    "sweep": Command(
        f"--sweep SETTING=VALUES [--sweep …] {_OWN}",
        "Train many experiments as lanes of one program: all combinations of the "
        "values, or the points of --sweep_file.",
        "tsfl sweep --config=mnist_case1 --sweep seed=0:5 --sweep algorithm=dms,fedavg",
        ("sweep", "sweep_file", "samples", "lanes_per_call", "config", "workdir"),
    ),
    "explain": Command(
        f"[--explain=compile] {_OWN}",
        "Describe a run, or with --sweep a sweep, without training: timeline, work, "
        "padding, memory, time.",
        "tsfl explain --config=frameworks/afl",
        ("explain", "config", "workdir"),
    ),
}


def help_text(program: str, flags: Iterable[Flag]) -> str:
    """What ``--help`` prints: a command's flags, and the common settings.

    Args:
      program: what the user called, such as "tsfl sweep"; another name than those of
        `COMMANDS` takes the flags of all.
      flags: of the command line.
    """
    own_command = COMMANDS.get(program.removeprefix("tsfl "))
    known = {flag.name: flag for flag in flags}
    usage, about, example, own = own_command or COMMANDS["run"]._replace(
        usage=f"{_OWN} [--sweep …] [--explain]",
        about="Train one experiment, many with --sweep, or describe with --explain.",
        flags=tuple(known),
    )
    others = [f"--{name}" for name in known if name not in own]
    more = f"Flags of the other commands: {', '.join(others)}."
    groups = [name for name in _groups() if name]
    lines = [
        *_filled(f"usage: {program} {usage}", len("usage: ")),
        "",
        *_filled(about),
        "",
        *([f"  {example}", ""] if own_command else []),
        *(_flag_entry(known[name]) for name in own),
        "",
        *([*_filled(more), ""] if others else []),
        "Common settings, with their defaults:",
        "",
        *map(entry, COMMON),
        "",
        f"All {len(SETTINGS)} settings: tsfl settings; those of a group: tsfl settings "
        f"{groups[0]}",
        *_filled(f"(groups: {', '.join(groups)})."),
        "Experiments that --config knows by name: tsfl configs.",
    ]
    return "\n".join(lines)


def _filled(text: str, indent: int = 0) -> list[str]:
    """Lines of a terminal; all but the first are indented."""
    return textwrap.wrap(
        text, _COLUMNS, subsequent_indent=" " * indent, break_on_hyphens=False
    )


def _groups() -> dict[str, list[str]]:
    """Names of the settings by section; "" has those of the experiment itself."""
    groups: dict[str, list[str]] = {}
    for name in SETTINGS:
        groups.setdefault(name.rpartition(".")[0], []).append(name)
    return groups


def chosen(group: str) -> list[str]:
    """The settings of a section, or the one of that name; "": all.

    Raises:
      UserError: no setting begins with that name.
    """
    found = [n for n in SETTINGS if not group or f"{n}.".startswith(f"{group}.")]
    if not found:
        groups = [name for name in _groups() if name]
        hint = nearest(group, [*groups, *SETTINGS])
        raise UserError(
            f"settings {group}: there is no such group or setting{hint} (groups: "
            f"{', '.join(groups)})"
        )
    return found


def suggestion(name: str) -> str:
    """The setting that a flag without ``config.`` was meant to be, "" for none."""
    if name in SETTINGS:
        return name
    found = [other for other in SETTINGS if other.rpartition(".")[2] == name]
    return found[0] if len(found) == 1 else ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _table(names: Iterable[str]) -> list[str]:
    lines = ["| setting | default | values | what it is |", "|---|---|---|---|"]
    for name in names:
        kind, known = SETTINGS[name]
        values = range_of(name) or kind.__name__
        cells = (f"`{name}`", f"`{get(Config(), name)!r}`", values, known.help)
        lines.append(f"| {' | '.join(map(_cell, cells))} |")
    return lines


def markdown() -> str:
    """The page docs/settings.md."""
    lines = [
        "# Settings",
        "",
        "Each setting can be changed on the command line, `--config.lr=0.01`, in a",
        "file of `configs/`, or in Python, `config.lr = 0.01`. `tsfl settings` prints",
        "this list and `tsfl settings data` one section. This page is made from",
        "`tsfl_jax/config.py` by `tsfl settings --markdown > docs/settings.md`.",
    ]
    sections = {
        field.name: str(type(get(Config(), field.name)).__doc__).splitlines()[0]
        for field in dataclasses.fields(Config)
        if dataclasses.is_dataclass(get(Config(), field.name))
    }
    for group, names in _groups().items():
        title = f"`{group}`" if group else "The experiment"
        about = [sections[group], ""] if group else []
        lines += ["", f"## {title}", "", *about, *_table(names)]
    return "\n".join(lines) + "\n"
