"""How a command ends: with one line and an exit code; no traceback for wrong input."""

import argparse
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from tsfl_jax.types import UserError, one_line

# What a user can do, wherever memory runs out.
LESS_MEMORY = (
    "use a smaller --config.client_block, --config.batch_size, --config.num_clients or "
    "--runs_per_call"
)


_signals: list[int] = []  # Ctrl-C since the command began


def _raise(number: int, frame: Any) -> None:
    del frame
    _signals.append(number)
    raise KeyboardInterrupt


def was_stopped() -> bool:
    """Whether Ctrl-C came; Python loses a KeyboardInterrupt in JAX's callbacks."""
    return bool(_signals)


def check_stopped() -> None:
    """Raise a KeyboardInterrupt that was lost."""
    if _signals:
        raise KeyboardInterrupt


started: list[str] = []  # the words of this process's command; none in a program


class Ended(Exception):  # noqa: N818, it is not always an error
    """The end of a command: a line and an exit code."""


def out_of_memory(error: BaseException) -> bool:
    """Return whether NumPy, or JAX on any device, could not allocate."""
    return isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)


def make_parser(name: str, doc: str | None) -> argparse.ArgumentParser:
    """A parser that answers wrong arguments in one line, without the usage before it.

    Args:
      name: of the command, after ``tsfl``.
      doc: the command's module docstring, whose first line is shown.
    """
    line = str(doc).splitlines()[0].replace("``", "")
    parser = argparse.ArgumentParser(
        f"tsfl {name}", description=line, allow_abbrev=False
    )

    def error(message: str) -> NoReturn:
        parser.exit(2, f"{parser.prog}: {message}; see {parser.prog} --help\n")

    parser.error = error
    return parser


def run(program: str, main: Callable[[list[str]], None], texts: list[str]) -> None:
    """Run a command.

    Exit codes: 0 when done, 2 for wrong input (as argparse has it), 130 when stopped
    with Ctrl-C.

    Args:
      program: how the command is called in messages.
      main: takes the arguments.
      texts: the arguments, without the program's name.
    """
    started[:] = ["python"] * program.endswith(".py") + [*program.split(), *texts]
    try:
        signal.signal(signal.SIGINT, _raise)
        try:
            return main(texts)
        finally:  # a library may drop Ctrl-C, or make another error of it
            check_stopped()
    except UserError as error:
        message, code = one_line(error), 2
    except Ended as ended:
        message, code = ended.args
    except KeyboardInterrupt:
        message, code = "stopped; the same command reuses what is finished", 130
    except Exception as error:
        message, code = f"not enough memory ({one_line(error)}); {LESS_MEMORY}", 2
        if not out_of_memory(error):
            raise
    line = "\n" if sys.stderr.isatty() else ""  # below a progress line
    print(f"{line}{program}: {message}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    sys.exit(code)
