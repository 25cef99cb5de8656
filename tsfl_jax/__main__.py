"""``tsfl COMMAND``, also ``python -m tsfl_jax COMMAND``.

``tsfl run`` is launch.py; each other command is a module.
"""

import importlib
import os
import sys

from absl import app, flags, logging

from tsfl_jax import command, config_files
from tsfl_jax.report import settings
from tsfl_jax.types import UserError, nearest

# Commands that train or explain -> the flags that they stand for.
_CLI = {"run": (), "sweep": (), "explain": ("--explain",)}
# Command -> module with a function main(arguments).
_MODULES = {
    "compare": "tsfl_jax.studies.compare",
    "reproduce": "tsfl_jax.studies.reproduce",
    "tensorboard": "tsfl_jax.report.tensorboard",
    "report": "tsfl_jax.report.page",
}
_HELP = """\
usage: tsfl COMMAND [arguments]

  run          train one experiment: tsfl run --config=mnist_case1 --config.lr=0.01
  sweep        train many: tsfl sweep --config=mnist_case1 --sweep seed=0:5
  explain      describe a run without training it
  compare      frameworks on one virtual clock: tsfl compare frameworks
  reproduce    tables and figures of the paper: tsfl reproduce table1
  report       one HTML file of runs, sweeps and studies: tsfl report runs/sweep
  tensorboard  event files of a finished run
  configs      list the experiments that --config knows by name
  settings     list settings with default, range and help: tsfl settings data

tsfl COMMAND --help explains the arguments, tsfl --version prints the version.
"""

_HELP_FLAGS = {"-h", "--h", "-help", "--help"}
_OWN_HELP = {
    "configs": "usage: tsfl configs\n\nList the experiments that --config knows by "
    "name, and what each is.",
    "settings": "usage: tsfl settings [GROUP or SETTING]\n\nList settings with "
    "default, range and help: tsfl settings data, tsfl settings lr.",
}


def run_cli(name: str, texts: list[str]) -> None:
    """Do what launch.py does with these arguments, with a ``--help`` of its own."""
    from tsfl_jax import cli  # defines flags: not for the other commands

    flags.adopt_module_key_flags(cli)  # for --help
    logging.set_verbosity(logging.WARNING)
    app.run(cli.main, argv=[f"tsfl {name}", *texts], flags_parser=cli.parse)


def list_configs(texts: list[str]) -> None:
    """Print the experiments that --config knows by name."""
    if texts:
        raise UserError(f"configs {texts[0]}: expected no arguments")
    for name, about in config_files.known().items():
        print(f"{name:<22}{about}")


def list_settings(texts: list[str]) -> None:
    """Print settings with default, range and help; ``--markdown``: the page of docs.

    Raises:
      UserError: no setting begins with that name, or several arguments.
    """
    if texts == ["--markdown"]:
        print(settings.markdown(), end="")
        return
    if len(texts) > 1:
        raise UserError(f"settings {' '.join(texts)}: expected one group or setting")
    print("\n".join(map(settings.entry, settings.chosen(texts[0] if texts else ""))))


def main() -> None:
    """Run the named command; end quietly if a pipe (``| head``) closes."""
    try:
        _dispatch()
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes once more at its end, which must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def _dispatch() -> None:
    """Run the named command; without one, list them."""
    name, texts = (sys.argv[1:2] or [""])[0], sys.argv[2:]
    own = {"configs": list_configs, "settings": list_settings}
    if name in ("", "-h", "--help", "help"):
        print(_HELP, end="")
    elif name in ("--version", "version"):
        print(f"tsfl_jax {sys.modules['tsfl_jax'].__version__}")
    elif name in own and _HELP_FLAGS & {*texts}:
        print(_OWN_HELP[name])
    elif name in _CLI:
        run_cli(name, [*_CLI[name], *texts])
    elif name in _MODULES:
        sys.argv[1:] = texts
        command.run(f"tsfl {name}", importlib.import_module(_MODULES[name]).main)
    elif name in own:
        sys.argv[1:] = texts
        command.run("tsfl", own[name])
    else:
        names = [*_CLI, *_MODULES, *own]
        print(
            f"tsfl: {name}: unknown command{nearest(name, names)} (one of: "
            f"{', '.join(names)})",
            file=sys.stderr,
        )
        sys.exit(2)


if __name__ == "__main__":
    main()
