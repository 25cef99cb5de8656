"""Ctrl-C while a command is still importing its libraries.

Imports take two seconds and may swallow a KeyboardInterrupt, so the process is ended
where the signal comes. Only for processes that are a command of this package. What
Python itself does before it reaches this module cannot be helped.
"""

import os
import signal
import sys
from typing import Any


def _stopped(number: int, frame: Any) -> None:
    del number, frame
    os.write(2, b"stopped\n")
    os._exit(130)


_signals: list[int] = []  # signals since `release`


def _raise(number: int, frame: Any) -> None:
    del frame
    _signals.append(number)
    raise KeyboardInterrupt


def _unraisable(lost: Any) -> None:
    if lost.exc_type is not KeyboardInterrupt:  # that one is raised by `check`
        sys.__unraisablehook__(lost)


def release() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again."""
    signal.signal(signal.SIGINT, _raise)
    sys.unraisablehook = _unraisable


def was_asked() -> bool:
    """Whether Ctrl-C came since `release`; Python loses one in JAX's callbacks."""
    return bool(_signals)


def check() -> None:
    """Raise a missed KeyboardInterrupt."""
    if was_asked():
        raise KeyboardInterrupt


def _is_command() -> bool:
    """Whether this process is a command, not a program that imports the package."""
    script = sys.argv[0] if sys.argv else ""
    if script == "-m":  # while Python imports the packages around the module
        name = sys.orig_argv[-len(sys.argv)].removeprefix("-m").partition(".")[0]
        script = getattr(sys.modules.get(name), "__file__", None) or ""
    root = os.path.join(
        os.path.dirname(os.path.dirname(os.path.realpath(__file__))), ""
    )
    door = os.path.realpath(script).removeprefix(root).replace(os.sep, "/")
    doors = ("launch.py", "tsfl_jax/__init__.py", "studies/__init__.py")
    return door in doors or os.path.basename(script) in ("tsfl", "tsfl.exe")


if _is_command():
    signal.signal(signal.SIGINT, _stopped)
