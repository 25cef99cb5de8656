"""Event files of a run."""

import struct

import pytest

from tsfl_jax.report import files, tensorboard
from tsfl_jax.types import UserError


def scalars(folder):
    """{(name, step): value}, read from the event files' records."""
    from tensorboardX.proto import event_pb2

    found = {}
    for path in folder.glob("events*"):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            event = event_pb2.Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]
            for value in event.summary.value:
                found[value.tag, event.step] = value.simple_value
    return found


def test_scalars_of_a_run(tmp_path):
    pytest.importorskip("tensorboardX")
    rows = [
        {"interval": 1, "test_accuracy": 0.5, "threshold": None},
        {"interval": 2, "test_accuracy": 0.75, "threshold": 2.5},
    ]
    files.write_metrics(tmp_path / "metrics.jsonl", rows)
    want = {
        ("test_accuracy", 1): 0.5,
        ("test_accuracy", 2): 0.75,
        ("threshold", 2): 2.5,
    }
    for _ in range(2):  # the second call replaces the files
        assert scalars(tensorboard.write_events(tmp_path)) == want
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "metrics.jsonl",
        "tensorboard",
    ]


def test_wrong_input(tmp_path):
    with pytest.raises(SystemExit):
        tensorboard.main([])
    with pytest.raises(UserError, match="no run among"):
        tensorboard.main([str(tmp_path / "gone")])
