"""How long compiling will take: what the same program took before, or a rough guess.

Times are kept beside JAX's compilation cache. A program is recognized by its recipe and
the shapes of its arguments, as far as they are known before tracing.
"""

import hashlib
import pathlib
from typing import IO, Any

import jax

from tsfl_jax.engine import devices, scan
from tsfl_jax.experiment.program import Arrays, Compiled, Program
from tsfl_jax.report import files, progress
from tsfl_jax.types import Params, UserError

_FILE = "compile_seconds.json"
_MOST = 1000  # programs, the newest
# Of the table in docs/performance.md: 2.8 s for 8 arrays of parameters, 21 s for 62.
_LEAST, _EACH = 2.0, 0.3


def _path() -> pathlib.Path | None:
    folder = getattr(jax.config, "jax_compilation_cache_dir")  # noqa: B009
    return pathlib.Path(folder) / _FILE if folder else None


def _key(program: Program, arrays: Arrays) -> str:
    """A digest of what shapes a program."""
    shapes = [f"{a.shape}{a.dtype}" for a in jax.tree.leaves(arrays)]
    device = program.mesh.devices.flat[0].device_kind
    recipe = program.recipe  # its optimizer and model are in the shapes
    text = f"{recipe}{shapes}{device}{program.mesh.size}{program.chunk}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _known(path: pathlib.Path | None) -> dict[str, Any]:
    return (files.read_json(path) or {}) if path else {}


def guess(params: Params) -> float:
    """Seconds of compiling without a cache, roughly, from the number of parameters."""
    return _LEAST + _EACH * len(jax.tree.leaves(params))


def text(program: Program, arrays: Arrays) -> str:
    """What to expect of compiling, for a progress line."""
    found = _known(_path()).get(_key(program, arrays))
    try:
        low, high = (float(s) for s in found or ())
    except (TypeError, ValueError):
        rough = guess(arrays.start.params)
        return f"compiling, about {rough:.0f} s by the size of the network"
    if high < 2 * low:
        return f"compiling, about {high:.0f} s as before"
    return f"compiling, {low:.0f} s if cached, else about {high:.0f} s as before"


def remember(program: Program, arrays: Arrays, seconds: float) -> None:
    """Keep how long a program took to compile; a cache is fast, so both ends."""
    path = _path()
    if path is None or not path.parent.is_dir() or not devices.first():
        return
    known, key = _known(path), _key(program, arrays)
    try:
        old = [float(s) for s in known.pop(key, ())]
    except (TypeError, ValueError):
        old = []
    known[key] = [round(f([*old, seconds]), 2) for f in (min, max)]
    try:
        files.write_json(path, dict(list(known.items())[-_MOST:]))
    except UserError:  # a full disk must not end a run for this
        return


def compile_program(
    program: Program,
    arrays: Arrays,
    stream: IO[str] | None,
    state: scan.State | None = None,
) -> Compiled:
    """Compile a program, with a line before it, while it takes long, and after it.

    Args:
      program: what to compile.
      arrays: as for `Program.compile`.
      stream: of the lines; None: none.
      state: as for `Program.compile`.
    """
    about = text(program, arrays) if stream is not None else ""
    progress.log(stream, about)
    with progress.heartbeat(stream) as doing:
        doing(about.split(",")[0])
        compiled = program.compile(arrays, state)
    progress.log(stream, f"compiled in {compiled.seconds:.1f} s")
    remember(program, arrays, compiled.seconds)
    return compiled
