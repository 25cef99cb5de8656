"""A user's own components: from Python, from a file, or from an installed package.

After `register` a component is one of the tables: its name can be chosen, its settings
are those of `Config`, flags and sweeps, and reports and `explain` know it.
"""

import argparse
import functools
import importlib
import importlib.metadata
import pathlib
import sys
import types
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import jax.numpy as jnp

from tsfl_jax.components import Part, check_arguments, check_name, section_of
from tsfl_jax.config import SECTIONS, extend, is_taken
from tsfl_jax.data import builtin, partition
from tsfl_jax.rules.base import Aggregator
from tsfl_jax.rules.custom import rule, rule_of_component
from tsfl_jax.timeline import Framework, cohort
from tsfl_jax.types import UserError, user_code
from tsfl_jax.uplink.link import Uplink

ENTRY_POINTS = "tsfl_jax.components"  # of a package: modules that call `register`
sources: dict[str, None] = {}  # files and modules, in order; Ray's workers load them


def _rule(part: Any) -> Aggregator:
    is_component = isinstance(part, type) and section_of(part)
    return rule_of_component(part) if is_component else rule(part)


def _lr_factor(function: Callable[[Any], Any]) -> Part:
    """A schedule of η_t/η by t, such as one of optax with a peak of 1."""
    return Part(lambda t, hparams: jnp.reshape(function(t), ()))


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
    "lr_schedule": _Table(Part, _lr_factor, "(t) -> factor of config.lr"),
}


def register(by: str, name: str, part: Any) -> None:
    """Add a component of one's own, for all configs of this process.

    Args:
      by: the setting that chooses it: "algorithm", "timeline.framework",
        "cohort.sampler", "uplink.chain", "data.name", "partition.kind", "model.name"
        or "lr_schedule".
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
    if not isinstance(part, table.kind):
        if not callable(part):
            raise UserError(
                f"{where}: expected a {table.kind.__name__} or a function "
                f"{table.takes}, got {part!r}"
            )
        part = table.make(part)
    part = _guarded(f"{by}={name}", part)
    if table.reads:
        part = part._replace(reads=tuple(dict.fromkeys((*table.reads, *part.reads))))
    extend(by, name, part)


def _guarded(where: str, row: Any) -> Any:
    """The row with functions that were checked and whose errors are one line."""
    check_arguments(where, row)
    fields = {}
    for name, value in row._asdict().items():
        if hasattr(value, "_fields"):
            fields[name] = _guarded(where, value)
        elif isinstance(value, types.FunctionType):
            fields[name] = _in_one_line(f"{where}: {name} fails", value)
    return row._replace(**fields)


def _in_one_line(failure: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        with user_code(failure, "mend the component"):
            return function(*arguments, **named)

    return call


def named(by: str, part: Any, others: Collection[str] = ()) -> str:
    """Register a part under its own name, which is returned and none of the others.

    That is the name of its settings or, without any, of its first function.
    """
    kinds = (part,) if section_of(part) else getattr(part, "sections", ())
    section = "_".join(n for n in map(section_of, kinds) if n and n not in SECTIONS)
    first = part[0] if isinstance(part, tuple) else part
    name = section or getattr(first, "__name__", "").strip("<>") or "own"
    name = f"own_{name}" if is_taken(by, name) else name
    while name in others:
        name += "_"
    register(by, name, part)
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
