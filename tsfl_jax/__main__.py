"""``tsfl COMMAND``, also ``python -m tsfl_jax COMMAND``."""

import functools
import os
import sys
import textwrap

from tsfl_jax import command, config_files, registry
from tsfl_jax.components import range_of
from tsfl_jax.config import SETTINGS, Config, get
from tsfl_jax.types import UserError, nearest

_HELP = """\
usage: tsfl COMMAND [arguments]

  run          train one experiment: tsfl run --config=mnist_case1 --config.lr=0.01
  sweep        train many: tsfl sweep --config=mnist_case1 --sweep seed=0:5
  explain      describe a run without training it
  report       one HTML file of runs, sweeps and studies: tsfl report runs/sweep
  configs      list the experiments that --config knows by name
  settings     list settings with default, range and help: tsfl settings data

tsfl COMMAND --help explains the arguments, tsfl --version prints the version.
"""


_COLUMNS = 99  # of a terminal


def list_configs(texts: list[str]) -> None:
    """List the experiments that --config knows by name, and what each is."""
    command.make_parser("configs", list_configs.__doc__).parse_args(texts)
    for name, description in config_files.descriptions().items():
        print(f"{name:<22}{description}")


def _entry(name: str) -> str:
    """Two or more lines on a setting: name, default, type; help and range."""
    kind, setting = SETTINGS[name]
    text = "; ".join(filter(None, (setting.help, range_of(setting))))
    lines = textwrap.indent(textwrap.fill(text, _COLUMNS - 4), " " * 4)
    return f"--config.{name}={get(Config(), name)!r}  ({kind.__name__})\n{lines}"


def _chosen(group: str) -> list[str]:
    """The settings of a section, or the one of that name; "": all."""
    names = [n for n in SETTINGS if not group or f"{n}.".startswith(f"{group}.")]
    if not names:
        sections = dict.fromkeys(name.rpartition(".")[0] for name in SETTINGS)
        hint = nearest(group, [*sections, *SETTINGS])
        raise UserError(f"{group}: there is no such group or setting{hint}")
    return names


def list_settings(texts: list[str]) -> None:
    """List settings with default, range and help: tsfl settings data.

    Raises:
      UserError: no setting begins with that name.
    """
    parser = command.make_parser("settings", list_settings.__doc__)
    registry.add_flag(parser)
    registry.load_named(texts)
    parser.add_argument("group", nargs="?", default="", help="section, or one setting")
    print("\n".join(map(_entry, _chosen(parser.parse_args(texts).group))))


def _report(texts: list[str]) -> None:
    from tsfl_jax.report import page  # slow: not for the other commands

    page.main(texts)


def _dispatch(name: str, texts: list[str]) -> None:
    """Run the named command; without one, list them."""
    commands = {"configs": list_configs, "settings": list_settings, "report": _report}
    train = ("run", "sweep", "explain")
    if name in ("", "-h", "--help", "help"):
        return print(_HELP, end="")
    if name in ("--version", "version"):
        return print(f"tsfl_jax {sys.modules['tsfl_jax'].__version__}")
    if name in train:
        from tsfl_jax import cli  # slow: not for the other commands

        main = functools.partial(cli.main, f"tsfl {name}")
    elif name in commands:
        main = commands[name]
    else:
        names = [*train, *commands]
        hint = f"{nearest(name, names)} (one of: {', '.join(names)})"
        print(f"tsfl: {name}: unknown command{hint}", file=sys.stderr)
        sys.exit(2)
    command.run(f"tsfl {name}", main, texts)


def main() -> None:
    """Run the named command; end quietly if a pipe (``| head``) closes."""
    try:
        _dispatch((sys.argv[1:2] or [""])[0], sys.argv[2:])
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes once more at its end, which must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


if __name__ == "__main__":
    main()
