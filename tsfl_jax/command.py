"""How a command ends: with one line and an exit code; no traceback for wrong input."""

import argparse
import sys
from collections.abc import Callable
from typing import NoReturn

from tsfl_jax import interrupts
from tsfl_jax.types import UserError


def out_of_memory(error: BaseException) -> bool:
    """Return whether NumPy, or JAX on any device, could not allocate."""
    return isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)


def make_parser(name: str, about: str | None) -> argparse.ArgumentParser:
    """A parser that answers wrong arguments in one line, without the usage before it.

    Args:
      name: of the command, after ``tsfl``.
      about: the command's module docstring, whose first line is shown.
    """
    parser = argparse.ArgumentParser(
        prog=f"tsfl {name}",
        description=str(about).splitlines()[0].replace("``", ""),
    )

    def error(message: str) -> NoReturn:
        parser.exit(2, f"{parser.prog}: {message}; see {parser.prog} --help\n")

    parser.error = error
    return parser


# What a user can do, wherever memory runs out.
LESS_MEMORY = (
    "use a smaller --config.client_chunk, --config.batch_size, --config.num_clients or "
    "--lanes_per_call"
)


def run(name: str, main: Callable[[list[str]], None]) -> None:
    """Run a command with the arguments of this process.

    Exit codes: 0 when done, 2 for wrong input (as argparse has it), 130 when stopped
    with Ctrl-C.

    Args:
      name: how the command is called in messages.
      main: takes the arguments without the program's name.
    """
    try:
        interrupts.release()
        main(sys.argv[1:])
    except UserError as error:
        message, code = str(error), 2
    except KeyboardInterrupt:
        message, code = "stopped; the same command reuses what is finished", 130
    except Exception as error:
        if not out_of_memory(error):
            raise
        message, code = f"not enough memory ({error}); {LESS_MEMORY}", 2
    else:
        return
    print(f"{name}: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(code)
