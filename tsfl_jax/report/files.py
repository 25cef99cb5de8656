"""Files of a workdir.

Every file is written under another name and then renamed, so that no file is ever
half-written. One process at a time writes to a workdir: it holds a lock of the
operating system. Nothing here trains.
"""

import contextlib
import importlib.metadata
import itertools
import json
import math
import os
import pathlib
import platform
import re
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import IO, TYPE_CHECKING, Any

import filelock
import numpy as np

from tsfl_jax.types import UserError, user_code

if TYPE_CHECKING:
    import pandas

_Path = str | pathlib.Path

_LOCK = ".lock"
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy", "tsfl_jax")


def new_workdir(root: _Path, label: str) -> pathlib.Path:
    """Make a new folder ``root/label-20261121-0642``, local time.

    Args:
      root: where runs are kept, made if missing.
      label: what the run is, such as "digits_case3-dms-seed0".

    Raises:
      UserError: the folder cannot be made.
    """
    name = re.sub(r"[^\w.+-]+", "_", f"{label}-{time.strftime('%Y%m%d-%H%M')}")
    path = prepare_workdir(root) / name
    for number in itertools.count(2):
        with contextlib.suppress(FileExistsError):
            path.mkdir()  # fails if another run made it first
            break
        path = path.with_name(f"{name}-{number}")
    return path


def check_workdir(path: _Path, flag: str = "--workdir") -> pathlib.Path:
    """Check before the work that a folder can be written or made, and make none."""
    path = folder_of(path, flag)
    # Folders that are not there may be made by another command at the same time.
    existing = (p for p in (path, *path.parents) if p.exists())
    prepare_workdir(next(existing, path), flag)
    return path


def folder_of(path: _Path, flag: str = "--workdir") -> pathlib.Path:
    """The folder as a path, with ~ expanded; it is not made.

    Args:
      path: of the folder.
      flag: of the command line, for messages.

    Raises:
      UserError: not a path, or one that the system cannot look up.
    """
    text = repr(str(path) if isinstance(path, os.PathLike) else path)
    problem = f"{flag.lstrip('-')}={text}: expected the path of a folder"
    with user_code(problem, f"choose another {flag}"):
        folder = pathlib.Path(path or None).expanduser()  # pyright: ignore[reportArgumentType]
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            folder.stat()  # refuses zero bytes and names that are too long
    return folder


def prepare_workdir(path: _Path, flag: str = "--workdir") -> pathlib.Path:
    """Make the folder of `folder_of` if needed, and check that it can be written.

    Raises:
      UserError: not a path, a file, or it cannot be made or written.
    """
    path = folder_of(path, flag)
    with user_errors(path, f"; choose another {flag}"):
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    return path


@contextlib.contextmanager
def lock(folder: _Path, name: str = _LOCK, patience: float = 0.0) -> Iterator[None]:
    """Lock a workdir for this process, by the file .lock there.

    The operating system holds the lock, so that it ends with the process, even if that
    is killed.

    Args:
      folder: an existing folder.
      name: of another file, which locks a part of the work.
      patience: seconds to wait for another process.

    Raises:
      UserError: another process holds it, or the file cannot be made.
    """
    file_lock = filelock.FileLock(pathlib.Path(folder) / name, timeout=patience)
    part = "" if name == _LOCK else f" ({name.lstrip('.')})"
    with user_errors(file_lock.lock_file):
        try:
            acquired = file_lock.acquire()
        except filelock.Timeout as error:
            raise UserError(
                f"{folder} is in use{part}: another process is writing there; "
                "wait for it to end, or choose another --workdir"
            ) from error
    with acquired:
        yield


@contextlib.contextmanager
def replacing(path: _Path) -> Iterator[IO[bytes]]:
    """Open a binary file that replaces `path`, also a link, once it is on the disk.

    Raises:
      UserError: it cannot be written, or the disk is full; a pipe or a device.
    """
    path = pathlib.Path(path)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with user_errors(path):
            if path.exists() and not (path.is_file() or path.is_dir()):
                raise UserError(f"cannot use {path}: it is a pipe or a device")
            with open(beside, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, path)
    finally:
        with contextlib.suppress(OSError):  # an error of above says more
            beside.unlink()


def write_json(path: _Path, obj: Any) -> None:
    """Write strict JSON: arrays as lists, NaN and ±inf as null; key order is kept."""
    text = json.dumps(plain(obj), indent=2, ensure_ascii=False, allow_nan=False)
    write_text(path, f"{text}\n")


def write_text(path: _Path, text: str) -> None:
    """Write a text file in UTF-8."""
    with replacing(path) as file:
        file.write(text.encode())


def write_csv(path: _Path, rows: "list[dict[str, Any]] | pandas.DataFrame") -> None:
    """Write a table with the union of the rows' keys as columns.

    NaN and ±inf stay empty; a float32 has the digits of the float64 of the same value.
    """
    import pandas

    frame = pandas.DataFrame(rows, dtype=object if isinstance(rows, list) else None)
    floats = frame.select_dtypes("floating").astype(float)
    frame = frame.assign(**floats.where(np.isfinite(floats)))
    write_text(path, frame.to_csv(index=False, lineterminator="\n"))


def markdown(rows: "list[dict[str, Any]] | pandas.DataFrame") -> str:
    """Format rows with the same keys as a Markdown table; |D_i| stays one cell."""
    import pandas

    cells = pandas.DataFrame(rows).astype(str).replace(r"\|", r"\\|", regex=True)
    plain = {"stralign": None, "numalign": None, "disable_numparse": True}
    return f"{cells.to_markdown(index=False, **plain)}\n"


def write_table(
    folder: pathlib.Path,
    name: str,
    rows: "list[dict[str, Any]] | pandas.DataFrame",
    head: str,
    *,
    csv: "pandas.DataFrame | None" = None,
    tex: str = "",
) -> list[pathlib.Path]:
    """Write a table as Markdown, as CSV, and for LaTeX if there is a text for it.

    Args:
      folder: where to write.
      name: of the files, without their endings.
      rows: of text.
      head: above the table in name.md.
      csv: other rows for name.csv; None: the same.
      tex: of name.tex; "": none.

    Returns:
      The paths: name.md, name.csv, name.tex.
    """
    paths = [folder / f"{name}.md", folder / f"{name}.csv", folder / f"{name}.tex"]
    write_text(paths[0], f"{head}\n\n{markdown(rows)}")
    write_csv(paths[1], rows if csv is None else csv)
    if tex:
        write_text(paths[2], tex)
    return paths[: 3 if tex else 2]


def read_bytes(path: _Path) -> bytes:
    """The content of a regular file.

    Links are not followed: a folder that was received may link to any file of the
    reader's machine.

    Raises:
      UserError: it is missing, a link, a pipe, a device or a folder.
    """
    with user_errors(path):
        if not stat.S_ISREG(os.lstat(path).st_mode):
            raise UserError(f"{path}: expected a regular file, no link")
        return pathlib.Path(path).read_bytes()


def read_json(path: _Path, kinds: Mapping[str, Any] = {}) -> dict | None:  # noqa: B006
    """The object that `write_json` wrote; None if the file is missing or damaged.

    Raises:
      UserError: a value is not of its type in `kinds`.
    """
    try:
        values = parse_json(read_bytes(path))
    except UserError:
        return None
    for name in kinds.keys() & (values or {}):
        if not isinstance(value := (values or {})[name], kinds[name]):
            raise UserError(f"{path}: {name} is {str(value)[:60]!r}; delete the file")
    return values


def parse_json(text: str | bytes) -> dict | None:
    """The object in a text of JSON; None if it is damaged or something else."""
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(text)
        return value if isinstance(value, dict) else None
    return None


def write_metrics(path: _Path, rows: Iterable[dict]) -> None:
    """Write the whole of metrics.jsonl, one object per interval."""
    lines = (json.dumps(plain(row), allow_nan=False) for row in rows)
    write_text(path, "".join(f"{line}\n" for line in lines))


def read_metrics(path: _Path) -> list[dict]:
    """The rows of metrics.jsonl.

    Raises:
      UserError: a line is not JSON or not a row of numbers, or there is no such file.
    """
    rows = []
    for number, line in enumerate(read_bytes(path).splitlines(), start=1):
        row = parse_json(line) or {}
        kinds = {type(value) for value in row.values()} - {int, float, type(None)}
        if kinds or type(row.get("interval")) is not int:
            raise UserError(
                f"{path}, line {number}: not JSON of an interval and numbers or null"
            )
        rows.append(row)
    return rows


def write_arrays(
    path: _Path, arrays: Mapping[str, np.ndarray], *, compress: bool = False
) -> None:
    """Write named arrays as an .npz; models are hardly smaller compressed."""
    save = np.savez_compressed if compress else np.savez
    with replacing(path) as file:
        # The stub takes arrays for the option `allow_pickle`.
        save(file, **arrays)  # pyright: ignore[reportArgumentType]


def read_arrays(path: _Path) -> dict[str, np.ndarray]:
    """All arrays of an .npz.

    Raises:
      UserError: it is missing or damaged.
    """
    line = user_code(f"cannot read {path}", "expected an .npz")
    # Opened here: np.load alone leaves a damaged file open.
    with line, open(path, "rb") as file, np.load(file, allow_pickle=False) as arrays:
        return dict(arrays)


def versions() -> dict[str, str | None]:
    """Versions of Python and the packages, and the commit when run from a checkout."""
    by_name: dict[str, str | None] = {"python": platform.python_version()}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            by_name[name] = importlib.metadata.version(name)
    return by_name | {"git_commit": _commit(pathlib.Path(__file__).parents[2])}


def processor() -> str:
    """The name of this machine's processor, as the operating system has it."""
    with contextlib.suppress(OSError):
        text = pathlib.Path("/proc/cpuinfo").read_text(errors="replace")
        if line := re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE):
            return line[1].strip()
    return platform.processor() or platform.machine()


@contextlib.contextmanager
def user_errors(path: _Path, way_out: str = "") -> Iterator[None]:
    """Turn errors of the operating system into one line that names the path."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot use {path}: {error.strerror}{way_out}") from error


def plain(obj: Any) -> Any:
    """The object as JSON returns it: lists, and None for NaN and ±inf."""
    if isinstance(obj, dict):
        return {str(key): plain(value) for key, value in obj.items()}
    if isinstance(obj, list | tuple):
        return [plain(value) for value in obj]
    if isinstance(obj, float):  # NumPy's float64, too
        return float(obj) if math.isfinite(obj) else None
    if hasattr(obj, "__array__"):
        return plain(np.asarray(obj).tolist())
    return str(obj) if isinstance(obj, os.PathLike) else obj


def _commit(checkout: pathlib.Path) -> str | None:
    if not (checkout / ".git").exists():  # else git would find a folder further up
        return None
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        run = subprocess.run(command, cwd=checkout, capture_output=True, timeout=5)
        return run.stdout.decode().strip() or None
