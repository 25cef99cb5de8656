"""Every setting that a message names exists."""

import pathlib
import re

from tsfl_jax.config import SETTINGS

ROOT = pathlib.Path(__file__).parents[1]
FILES = sorted([*ROOT.glob("tsfl_jax/**/*.py"), ROOT / "launch.py"])


def test_every_setting_that_a_message_names_exists():
    """A name before what is filled in is a section."""
    named = {
        name: path.name
        for path in FILES
        for name in re.findall(r"--config\.(\w[\w.]*)", path.read_text("utf-8"))
    }
    assert {"timeline.framework", "num_clients"} <= {*named}
    known = {*SETTINGS, *(name.partition(".")[0] for name in SETTINGS), "NAME"}
    assert not {n: path for n, path in named.items() if n.strip(".") not in known}
