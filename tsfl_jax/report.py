"""Files of a workdir, and what a person sees on the terminal.

Every file is written beside its place and then renamed, so that nothing is ever
half-written; only metrics.jsonl also grows, by whole lines. Knows nothing of training.
"""

import contextlib
import importlib.metadata
import itertools
import json
import logging
import math
import os
import pathlib
import platform
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from typing import IO, Any

import numpy as np

from tsfl_jax.types import UserError

_BAR = 10  # characters
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy", "tsfl_jax")


def new_workdir(root: str | pathlib.Path, label: str) -> pathlib.Path:
    """Makes a new folder ``root/label-20261121-0642``, local time.

    Args:
      root: where runs are kept, made if missing.
      label: what the run is, such as "digits_case3-dms-seed0".

    Raises:
      UserError: the folder cannot be made.
    """
    label = re.sub(r"[^\w.+-]+", "_", label)
    name = f"{label}-{time.strftime('%Y%m%d-%H%M')}"
    root = prepare_workdir(root)
    for number in itertools.count(1):
        path = root / (name if number == 1 else f"{name}-{number}")
        with contextlib.suppress(FileExistsError):
            path.mkdir()  # fails if another run was quicker, so each has its own
            break
    return path


def prepare_workdir(path: str | pathlib.Path) -> pathlib.Path:
    """Makes the folder if needed and checks that files can be written there.

    Raises:
      UserError: it is a file, or cannot be made or written.
    """
    path = pathlib.Path(path).expanduser()
    probe = path / f".writable-{os.getpid()}"
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise UserError(
            f"cannot write to {path}: {error.strerror}; choose another --workdir"
        ) from error
    return path


@contextlib.contextmanager
def replacing(path: str | pathlib.Path) -> Iterator[IO[bytes]]:
    """A binary file that takes its place only when all of it is on the disk.

    Raises:
      UserError: it cannot be written, or the disk is full.
    """
    path = pathlib.Path(path)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with _user_errors(path):
            with open(beside, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def write_json(path: str | pathlib.Path, obj: Any) -> None:
    """Writes strict JSON: arrays as lists, NaN and ±inf as null; key order is kept."""
    text = json.dumps(_plain(obj), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    with replacing(path) as file:
        file.write(text.encode())


def write_metrics(path: str | pathlib.Path, rows: Iterable[dict]) -> None:
    """Writes the whole of metrics.jsonl, one object per interval."""
    with replacing(path) as file:
        file.write(_lines(rows))


def append_metrics(path: str | pathlib.Path, rows: Iterable[dict]) -> None:
    """Adds rows to metrics.jsonl; they are on the disk when this returns."""
    with _user_errors(path), open(path, "ab") as file:
        file.write(_lines(rows))
        file.flush()
        os.fsync(file.fileno())


def read_metrics(path: str | pathlib.Path) -> list[dict]:
    """Returns the rows of metrics.jsonl, without a last line that was cut off.

    Raises:
      UserError: another line is not JSON, or there is no such file.
    """
    with _user_errors(path):
        lines = pathlib.Path(path).read_bytes().splitlines(keepends=True)
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            if line.endswith(b"\n"):  # else it was cut off
                raise UserError(f"{path}, line {number}: not JSON") from error
    return rows


def write_clients(
    path: str | pathlib.Path,
    tau: np.ndarray,
    size: np.ndarray,
    rho: np.ndarray,
    selected: np.ndarray,
) -> None:
    """Writes clients.npz: local iterations, samples, weights and selection, [T, N]."""
    with replacing(path) as file:
        np.savez_compressed(file, tau=tau, size=size, rho=rho, selected=selected)


def write_arrays(path: str | pathlib.Path, arrays: dict[str, np.ndarray]) -> None:
    """Writes named arrays as an .npz, not compressed: weights hardly shrink."""
    with replacing(path) as file:
        np.savez(file, **arrays)


def versions() -> dict[str, str | None]:
    """Versions of Python and the packages, and the commit when run from a checkout."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found | {"git_commit": _commit(pathlib.Path(__file__).parents[1])}


def summary_text(summary: dict, workdir: str | pathlib.Path | None = None) -> str:
    """The closing lines of a run, for a person; leaves out what summary lacks.

    Args:
      summary: the dict of summary.json.
      workdir: where the files are, None if there are none.
    """
    s = {key: value for key, value in summary.items() if value is not None}
    title = [str(s[key]) for key in ("data", "algorithm") if key in s]
    title += [f"seed {s['seed']}"] if "seed" in s else []
    best, final = s.get("best_test_accuracy"), s.get("final_test_accuracy")
    table = {
        "run": ", ".join(title),
        "test accuracy": f"best {_percent(best)}, final {_percent(final)}",
        "intervals": f"{s['num_intervals']:,}" if "num_intervals" in s else "",
    }
    if "train_seconds" in s:
        table["time"] = f"{s['train_seconds']:.1f} s training"
        table["time"] += f", {s.get('compile_seconds', 0):.1f} s compiling"
    if math.isfinite(s.get("samples_per_second", math.nan)):
        table["speed"] = f"{s['samples_per_second']:,.0f} samples/s"
    if s.get("num_dropped"):
        table["dropped"] = f"{s['num_dropped']:,} client models that were not finite"
    if "diverged_at" in s:
        table["stopped"] = f"every client diverged in interval {s['diverged_at']};"
        table["stopped"] += " the model before it is kept; try a smaller lr"
    if workdir is not None:
        table["files"] = str(workdir)
    return "\n".join(f"{name:<15}{text}" for name, text in table.items() if text)


def progress_line(
    done: int,
    total: int,
    accuracy: float | None,
    loss: float | None,
    elapsed_s: float,
    started_at: int = 0,
) -> str:
    """One line on how far a run is.

    Args:
      done: finished intervals.
      total: intervals of the whole run.
      accuracy: in [0, 1]; None or NaN if not evaluated, and so is the loss.
      loss: mean over samples.
      elapsed_s: seconds this process has trained.
      started_at: finished intervals when this process began; not counted as its speed.
    """
    here = done - started_at
    rate, left = "–", "–"
    if here > 0 and elapsed_s > 0:
        speed = here / elapsed_s
        rate = f"{speed:.1f}" if speed >= 1 else f"{speed:.2g}"
        left = _clock((total - done) / speed)
    known = loss is not None and not math.isnan(loss)
    loss = f"{loss:{'.3f' if 0.001 <= loss < 1000 else '.3g'}}" if known else "–"
    line = f"interval {done}/{total}, accuracy {_percent(accuracy)}, loss {loss}"
    line += f", {rate} intervals/s"
    if done >= total:
        return f"{line}, done in {_clock(elapsed_s)}"
    full = _BAR * done // total
    return f"{line}, {left} left [{'#' * full}{'-' * (_BAR - full)}]"


def show(line: str, stream: IO[str] | None, last: bool = False) -> None:
    """Shows a line: on a terminal in place of the one before, elsewhere below it.

    Args:
      line: as from ``progress_line``.
      stream: where to; None is nowhere.
      last: nothing will replace it: end it with a newline on a terminal, too.
    """
    if stream is None:
        return
    if stream.isatty():
        width = (
            shutil.get_terminal_size().columns - 1
        )  # a full row would scroll some terminals
        if len(line) > width and not last:
            line = line.split(" [")[0][:width]  # the bar is what can be spared
        line = f"\r{line:<{width}}"
    end = "" if stream.isatty() and not last else "\n"
    encoding = getattr(stream, "encoding", None) or "utf-8"
    stream.write(f"{line}{end}".encode(encoding, "replace").decode(encoding))
    stream.flush()


def tell(stream: IO[str] | None, text: str) -> None:
    """Says something that stays on the terminal; a None stream says nothing."""
    show(text, stream, last=True)


def notice(stream: IO[str] | None) -> Callable[[str], None]:
    """A function that passes on what must not be missed, to the log if no stream."""
    if stream is None:
        return logging.getLogger("tsfl_jax").warning
    return lambda text: tell(stream, text)


@contextlib.contextmanager
def _user_errors(path: str | pathlib.Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot use {path}: {error.strerror}") from error


def _plain(obj: Any) -> Any:
    """The same with nothing that strict JSON lacks."""
    if isinstance(obj, dict):
        return {str(key): _plain(value) for key, value in obj.items()}
    if isinstance(obj, list | tuple):
        return [_plain(value) for value in obj]
    if isinstance(obj, float):  # NumPy's float64, too
        return float(obj) if math.isfinite(obj) else None
    if hasattr(obj, "__array__"):
        return _plain(np.asarray(obj).tolist())
    return str(obj) if isinstance(obj, os.PathLike) else obj


def _lines(rows: Iterable[dict]) -> bytes:
    texts = [json.dumps(_plain(row), allow_nan=False) for row in rows]
    return "".join(f"{text}\n" for text in texts).encode()


def _commit(checkout: pathlib.Path) -> str | None:
    if not (checkout / ".git").exists():  # else git would find a folder further up
        return None
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        run = subprocess.run(command, cwd=checkout, capture_output=True, timeout=5)
        return run.stdout.decode().strip() or None


def _percent(share: float | None) -> str:
    return "–" if share is None or math.isnan(share) else f"{100 * share:.1f} %"


def _clock(seconds: float) -> str:
    minutes, s = divmod(round(seconds), 60)
    h, m = divmod(minutes, 60)
    return f"{h}:{m:02d}:{s:02d}" if h else f"{m}:{s:02d}"
