"""Every setting that a message names exists."""

import ast
import dataclasses
import pathlib
import re

from tsfl_jax.config import Config, flat

ROOT = pathlib.Path(__file__).parents[1]
FILES = sorted([*ROOT.glob("tsfl_jax/**/*.py"), ROOT / "launch.py"])
DEFAULTS = dataclasses.asdict(Config())
SETTINGS = set(flat(DEFAULTS))
SECTIONS = {name for name, value in DEFAULTS.items() if isinstance(value, dict)}
SUFFIXES = {"py", "npz"}
FLAG = r"--config\.([a-z_]+(?:\.[a-z_]+)*)"


def texts(path):
    """(line, text) of all strings of a file; "{}" is what is filled in."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    joined = [node for node in nodes if isinstance(node, ast.JoinedStr)]
    parts = {id(part) for node in joined for part in node.values}
    for node in joined:
        values = [getattr(part, "value", None) for part in node.values]
        text = "".join(value if isinstance(value, str) else "{}" for value in values)
        yield node.lineno, text
    for node in nodes:
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
        if is_text and id(node) not in parts:
            yield node.lineno, node.value


def named(text):
    """Names of settings in a text, complete ones and (name, rest to be filled in)."""
    for match in re.finditer(FLAG + r"(\.?\{\})?", text):
        yield match[1] + (match[2] or "")
    # A flag on its own, to be put behind "--config."; files are none.
    section, _, rest = text.partition(".")
    if section in SECTIONS and re.fullmatch("[a-z_]+", rest) and rest not in SUFFIXES:
        yield text


def exists(name):
    """A setting; "data.{}" is the beginning of one."""
    if name.endswith("{}"):
        return any(s.startswith(name.removesuffix("{}")) for s in SETTINGS)
    return name in SETTINGS


def test_every_setting_that_a_message_names_exists():
    names = {}
    for path in FILES:
        for line, text in texts(path):
            names |= dict.fromkeys(named(text), f"{path.name}:{line}")
    assert not {name: place for name, place in names.items() if not exists(name)}
    assert {"schedule.tau", "timeline.buffer", "num_clients", "timeline.{}"} <= {*names}
    assert list(named("--config.timeline.draws=3: bad")) == ["timeline.draws"]
    assert not exists("timeline.draws") and not exists("timeline.x{}")
