"""A user's own components: from Python, from a file, or from an installed package.

After `register` a component is one of the tables: its name can be chosen, its settings
are those of `Config`, flags and sweeps, and reports and `explain` know it.
"""

import argparse
import importlib
import importlib.metadata
import pathlib
import sys
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tsfl_jax.components import Part, check_arguments, check_name, section_of
from tsfl_jax.config import LISTS, SECTIONS, TABLES, extend, is_taken
from tsfl_jax.data import builtin, partition
from tsfl_jax.rules.base import Aggregator
from tsfl_jax.rules.custom import rule, rule_of_component
from tsfl_jax.timeline import Framework, cohort
from tsfl_jax.types import HParams, UserError, user_code
from tsfl_jax.uplink.link import Uplink

ENTRY_POINTS = "tsfl_jax.components"  # of a package: modules that call `register`
registered: dict[tuple[str, str], Any] = {}  # that `register` got, by setting and name
sources: dict[str, None] = {}  # files and modules, in order; Ray's workers load them


def _rule(part: Any) -> Aggregator:
    is_component = isinstance(part, type) and section_of(part)
    return rule_of_component(part) if is_component else rule(part)


class _Table(NamedTuple):
    """What a table of components takes."""

    kind: type  # of its rows
    make: Callable[[Any], Any]  # a row of a function
    takes: str  # the arguments of that function
    # Settings that nearly all its parts read.
    reads: tuple[str, ...] = ()


_TABLES = {
    "algorithm": _Table(Aggregator, _rule, "(info) -> weights, a component"),
    "timeline.framework": _Table(Framework, Framework, "(fleet, …) -> Simulation"),
    "cohort.sampler": _Table(cohort.Sampler, cohort.own_sampler, "(draw) -> ids"),
    "uplink.chain": _Table(
        Uplink,
        lambda send: Uplink(send=send),
        "(update, state, info, settings) -> (update, state)",
    ),
    "data.name": _Table(Part, Part, "(settings, seed) -> Dataset", builtin.COMMON),
    "partition.kind": _Table(
        Part, Part, "(settings, capacity, stock, rng) -> shares", partition.DRAWN
    ),
    "model.name": _Table(Part, Part, "(num_classes, settings, form) -> module"),
    "timeline.fleet": _Table(Part, Part, "(not here: Part({setting: value}))"),
    "lr_schedule": _Table(
        Part, lambda f: Part(lambda t, h: jnp.reshape(f(t), ())), "(t) -> factor of lr"
    ),
}


def register(by: str, name: str, part: Any) -> None:
    """Add a component of one's own, for all configs of this process.

    Args:
      by: the setting that chooses it: "algorithm", "timeline.framework",
        "cohort.sampler", "uplink.chain", "data.name", "partition.kind", "model.name",
        "timeline.fleet" or "lr_schedule".
      name: what that setting is then called; one of the package's is refused, one of
        the user's own is replaced.
      part: a row of the table, such as `Aggregator`, `timeline.Framework`,
        `uplink.link.Uplink` or `components.Part`; or its function alone.

    Raises:
      UserError: no such table, a name that is taken, or functions of other arguments.
    """
    check_name("register", by, _TABLES)
    table, where = _TABLES[by], f"register({by!r}, {name!r})"
    if not name.isidentifier():
        raise UserError(f"{where}: expected letters, digits and _ as a name")
    row = part
    if not isinstance(row, table.kind) or getattr(row, "make", row) is None:
        if not callable(row):
            raise UserError(
                f"{where}: expected a {table.kind.__name__} or a function "
                f"{table.takes}, got {row!r}"
            )
        row = table.make(row)
    row = _guarded(f"{by}={name}", row)
    if table.reads:
        row = row._replace(reads=tuple(dict.fromkeys((*table.reads, *row.reads))))
    if by == "lr_schedule":  # now: all of the table are traced together
        jax.eval_shape(row.make, jnp.float32(0), HParams())
    extend(by, name, row)
    registered[by, name] = part


def _guarded(where: str, row: Any) -> Any:
    """The row with functions that were checked and whose errors are one line."""
    check_arguments(where, row)
    fields = {}
    for name, value in row._asdict().items():
        if hasattr(value, "_fields"):
            fields[name] = _guarded(where, value)
        elif callable(value) and not isinstance(value, type):
            fails = user_code(f"{where}: {name} fails", "mend the component")
            fields[name] = fails(value)  # also a decorator
    return row._replace(**fields)


def named(by: str, part: Any, used: Collection[str] = ()) -> str:
    """Register a part under its own name, which is returned and is not in use.

    That is the name of its settings or, without any, of its first function. A part of
    the package has its name, and what `register` got keeps its own.
    """
    if names := [name for name, row in (TABLES | LISTS)[by].items() if row == part]:
        return names[0]
    kinds = (part,) if section_of(part) else getattr(part, "sections", ())
    section = "_".join(n for n in map(section_of, kinds) if n and n not in SECTIONS)
    first = part[0] if isinstance(part, tuple) else part
    name = section or getattr(first, "__name__", "").strip("<>") or "own"
    name = f"own_{name}" if is_taken(by, name) else name
    while name in used or registered.get((by, name)) not in (None, part):
        name += "_"
    kept = registered.get((by, name))
    register(by, name, part)
    registered[by, name] = kept  # None: the next one may have that name
    return name


def load(source: str) -> None:
    """Run a Python file or import a module, which calls `register`.

    Raises:
      UserError: it cannot be read, or what `register` refuses.
    """
    expected = "expected a Python file or a module that calls tsfl_jax.register"
    with user_code(f"--components={source}: cannot be read", expected):
        if source.endswith(".py"):
            _load_file(path := pathlib.Path(source).resolve())
            source = str(path)  # a Ray worker may have another folder
        else:
            importlib.import_module(source)
    sources[source] = None


def add_flag(parser: argparse.ArgumentParser) -> None:
    """The flag of all commands that know settings, for `load_named`."""
    text = "a Python file or module with components of your own; repeatable"
    add = parser.add_argument
    add("--components", metavar="FILE", action="append", default=[], help=text)


def load_named(texts: list[str]) -> None:
    """Load what a command line names with --components."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_flag(parser)
    for source in parser.parse_known_args(texts)[0].components:
        load(source)


def _load_file(path: pathlib.Path) -> None:
    """Import a file under its name, once; it may import its neighbors."""
    sys.path.insert(0, str(path.parent))  # as Python does with a script's
    module = importlib.import_module(path.stem)
    if module.__file__ != str(path):
        raise ImportError(f"there is a module {path.stem}; rename the file")


def load_installed() -> None:
    """Load the modules that installed packages have as entry points."""
    for point in importlib.metadata.entry_points(group=ENTRY_POINTS):
        expected = "repair or remove the package"
        with user_code(f"entry point {point.name} of {ENTRY_POINTS} fails", expected):
            point.load()
