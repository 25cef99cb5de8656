"""What readers of files share: a mistake is one line that names the file."""

import importlib
import os
import pathlib
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from jaxtyping import Bool, Shaped

from tsfl_jax.data.settings import DataConfig
from tsfl_jax.types import UserError, user_code


def require(good: Any, message: str) -> None:
    """Raise `UserError` with the message unless it is good."""
    if not good:
        raise UserError(message)


def require_values(
    array: str,
    values: Shaped[np.ndarray, "M ..."],
    good: Bool[np.ndarray, "M ..."],
    expected: str,
) -> None:
    """Raise `UserError` that names the first value of an array that is not good."""
    if not good.all():
        index = tuple(np.argwhere(~good)[0].tolist())
        raise UserError(
            f"{array} holds {values[index]} at row {index[0]}; expected {expected}"
        )


def reading(path: object, expected: str) -> AbstractContextManager[None]:
    """Make one line of what is raised where a file is read."""
    return user_code(f"{path}: cannot be read", f"expected {expected}")


def check(good: Any, reason: str) -> None:
    """Raise `ValueError`, to which `reading` adds the file, unless it is good."""
    if not good:
        raise ValueError(reason)


def folder(settings: DataConfig, content: str) -> pathlib.Path:
    """The folder ``data.dir``, which should hold some content.

    Raises:
      UserError: there is none, or it cannot be read.
    """
    name = f"--config.data.name={settings.name}"
    require(settings.dir, f"{name} needs --config.data.dir=FOLDER with {content}")
    with reading(f"--config.data.dir={settings.dir}", f"a folder with {content}"):
        path = pathlib.Path(settings.dir).expanduser()
        os.listdir(path)
        return path


def package(name: str, extra: str = "natural") -> Any:
    """A package that only some features need.

    Raises:
      UserError: it is not installed.
    """
    with user_code(f"{name} cannot be imported", f"pip install 'tsfl_jax[{extra}]'"):
        return importlib.import_module(name)
