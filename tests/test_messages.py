"""Every setting that a message names exists."""

import ast
import dataclasses
import pathlib
import re

import pytest

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
    joined = [n for n in nodes if isinstance(n, ast.JoinedStr)]
    parts = {id(part) for node in joined for part in node.values}
    for node in joined:
        known = [getattr(part, "value", None) for part in node.values]
        yield (
            node.lineno,
            "".join(part if isinstance(part, str) else "{}" for part in known),
        )
    for node in nodes:
        text = getattr(node, "value", None)
        if (
            isinstance(node, ast.Constant)
            and isinstance(text, str)
            and id(node) not in parts
        ):
            yield node.lineno, text


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


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_setting_that_a_message_names_exists(path):
    wrong = [
        f"{path.name}:{line}: {name}"
        for line, text in texts(path)
        for name in named(text)
        if not exists(name)
    ]
    assert not wrong


def test_the_collection_finds_what_is_wrong():
    found = [n for p in FILES for _, text in texts(p) for n in named(text)]
    assert {"schedule.tau", "timeline.buffer", "num_clients"} <= set(found)
    assert "timeline.{}" in found and len(set(found)) > 40
    assert list(named("--config.timeline.draws=3: bad")) == ["timeline.draws"]
    assert not exists("timeline.draws") and not exists("timeline.x{}")
