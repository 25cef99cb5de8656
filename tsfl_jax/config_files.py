"""Where the files of experiments are: ``configs/`` of a checkout, or in the package.

``--config`` takes a path, or the name of one of these files without folder and ending;
the text after a colon is passed to its `get_config`: ``frameworks/afl:digits``.
"""

import os
import pathlib
import runpy

from tsfl_jax.config import Config
from tsfl_jax.types import UserError, nearest, user_code

_PACKAGE = pathlib.Path(__file__).resolve().parent
# An installed package has the folder inside, a checkout beside it.
FOLDER = next(
    (p for p in (_PACKAGE / "configs", _PACKAGE.parent / "configs") if p.is_dir()),
    _PACKAGE / "configs",
)


def _files() -> dict[str, pathlib.Path]:
    """By name: "mnist_case1", "frameworks/afl"."""
    files = sorted(FOLDER.glob("*.py")) + sorted(FOLDER.glob("*/*.py"))
    return {str(p.relative_to(FOLDER).with_suffix("")): p for p in files}


def descriptions() -> dict[str, str]:
    """Name of each experiment and the first line of its description."""
    texts = {name: path.read_text(encoding="utf-8") for name, path in _files().items()}
    return {n: text.strip('"').split("\n")[0].strip('" ') for n, text in texts.items()}


def find(name: str, flag: str = "") -> str:
    """The path of an experiment's file.

    Args:
      name: a path, or a name such as ``mnist_case1``, ``frameworks/afl``, ``afl`` or
        ``configs/mnist_case1.py``; ``papers.py:NAME`` and ``papers:NAME`` pass NAME to
        the file.
      flag: what stood before it on the command line, for messages.

    Raises:
      UserError: there is no such file.
    """
    path, argument = split(name)
    if os.path.isfile(path):
        return name
    files, stem = _files(), path.removeprefix("configs/").removesuffix(".py")
    inside = files.get(stem) or files.get(f"frameworks/{stem}")
    if inside is None:
        beside = [str(p) for p in pathlib.Path(path).parent.glob("*.py")]
        hint = nearest(path, beside) or nearest(stem, files)
        raise UserError(f"{flag}{path}: no such file{hint}; tsfl configs lists them")
    return f"{inside}:{argument}" if argument else str(inside)


def load(name: str | pathlib.Path, flag: str = "") -> Config:
    """The config that ``get_config()`` of an experiment's file returns.

    Args:
      name: a path or name, as for `find`.
      flag: what stood before it on the command line, for messages.

    Raises:
      UserError: no such file, an error in it, or no config in it.
    """
    path, argument = split(find(str(name), flag))
    expected = "get_config() must return a Config"
    with user_code(f"{flag}{path}: cannot be read", expected):
        get_config = runpy.run_path(path).get("get_config", lambda *_: None)
        config = get_config(argument) if argument else get_config()
    if not isinstance(config, Config):
        raise UserError(f"{flag}{path}: {expected}")
    return config


def split(name: str) -> tuple[str, str]:
    """A path or name, and what is passed to the file; "" for nothing.

    >>> split("frameworks/afl:digits")
    ('frameworks/afl', 'digits')
    """
    path, colon, argument = name.rpartition(":")
    # C:\\afl.py has a colon, too.
    return (path, argument) if colon and not {*argument} & {*"/\\."} else (name, "")
