"""Where the files of experiments are: ``configs/`` of a checkout, or in the package.

``--config`` takes a path, or the name of one of these files without folder and ending;
the text after a colon is passed to its `get_config`: ``frameworks/afl:digits``.
"""

import pathlib
from collections.abc import Iterable

from tsfl_jax.types import UserError, nearest

_PACKAGE = pathlib.Path(__file__).resolve().parent
# An installed package has the folder inside, a checkout beside it.
FOLDER = next(
    (p for p in (_PACKAGE / "configs", _PACKAGE.parent / "configs") if p.is_dir()),
    _PACKAGE / "configs",
)
DEFAULT = FOLDER / "digits_case3.py"


def _files() -> dict[str, pathlib.Path]:
    """By name: "mnist_case1", "frameworks/afl"."""
    found = sorted(FOLDER.glob("*.py")) + sorted(FOLDER.glob("*/*.py"))
    return {str(p.relative_to(FOLDER).with_suffix("")): p for p in found}


def known() -> dict[str, str]:
    """Name of each experiment and the first line of its description."""
    texts = {name: path.read_text(encoding="utf-8") for name, path in _files().items()}
    return {n: text.strip('"').split("\n")[0].strip('" ') for n, text in texts.items()}


def _is_file(path: str, flag: str = "") -> bool:
    try:
        return pathlib.Path(path).is_file()
    except (OSError, ValueError) as error:  # a name too long, or a zero byte in it
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{flag}{path}: {reason}") from error


def paths(given: Iterable[str]) -> list[pathlib.Path]:
    """The files of several experiments.

    Args:
      given: paths, names as for `find`, or folders of experiments: "frameworks",
        "frameworks:digits".

    Raises:
      UserError: one of them is neither a file nor a known name.
    """
    found: list[pathlib.Path] = []
    for name in given:
        if _is_file(name):
            found.append(pathlib.Path(name))
            continue
        folder, argument = split(name)
        folder = folder.rstrip("/").removeprefix("configs/")
        inside = [
            pathlib.Path(f"{path}:{argument}") if argument else path
            for n, path in _files().items()
            if n.startswith(f"{folder}/")
        ]
        found += inside or [pathlib.Path(find(name, flag=""))]
    return found


def find(given: str, flag: str = "--config=") -> str:
    """The path of an experiment's file.

    Args:
      given: a path, or a name such as ``mnist_case1``, ``frameworks/afl``, ``afl`` or
        ``configs/mnist_case1.py``; ``papers.py:NAME`` and ``papers:NAME`` pass NAME to
        the file.
      flag: what stood before it on the command line, for messages.

    Raises:
      UserError: there is no such file.
    """
    path, argument = split(given)
    files = _files()
    if _is_file(path, flag):
        return given
    name = path.removeprefix("configs/").removesuffix(".py")
    inside = files.get(name) or files.get(f"frameworks/{name}")
    if inside is None:
        beside = [str(p) for p in pathlib.Path(path).parent.glob("*.py")]
        names = [*beside, *files, *(f"configs/{n}.py" for n in files)]
        raise UserError(f"{flag}{path}: no such file{nearest(path, names)}")
    return f"{inside}:{argument}" if argument else str(inside)


def split(given: str) -> tuple[str, str]:
    """A path or name, and what is passed to the file; "" for nothing.

    >>> split("frameworks/afl:digits")
    ('frameworks/afl', 'digits')
    """
    path, colon, argument = given.rpartition(":")
    # C:\\afl.py has a colon, too.
    return (path, argument) if colon and not {*argument} & {*"/\\."} else (given, "")
