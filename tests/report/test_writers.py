"""Writers follow a run; a run ends early by its scores or by a writer's answer."""

import csv
import importlib.util
import json
import struct
from unittest import mock

import numpy as np
import pytest

import tsfl_jax
from tsfl_jax.config import Config, replace
from tsfl_jax.report import files, writers
from tsfl_jax.run import runner
from tsfl_jax.sections import StopConfig
from tsfl_jax.types import UserError

NAN = float("nan")
SMALL = {
    "num_intervals": 8,
    "num_clients": 4,
    "batch_size": 8,
    "lr": 0.03,
    "algorithm": "fedavg",
    "report_every": 1,  # as where a run may end early
    "devices": 1,
    "schedule.data_size": 32,
    "partition.kind": "iid",
    "model.hidden": 0,
}
LIBRARIES = {"tensorboard": "tensorboardX", "wandb": "wandb", "mlflow": "mlflow"}
INSTALLED = [n for n, lib in LIBRARIES.items() if importlib.util.find_spec(lib)]


def config_of(changes=None):
    return replace(Config(), SMALL | (changes or {}))


@pytest.mark.parametrize(
    ("at", "patience", "accuracy", "ends"),
    [
        (0.5, 0, [0.4, 0.49], False),
        (0.5, 0, [NAN, 0.6, NAN], True),
        (0.0, 2, [0.4, 0.3, NAN, 0.4], True),  # equal is not better
        (0.0, 2, [0.4, 0.3, 0.5], False),
        (0.0, 0, [0.9, 0.1, 0.1, 0.1], False),
    ],
)
def test_when_a_run_ends(at, patience, accuracy, ends):
    stop = StopConfig(at=at, patience=patience)
    assert stop.is_reached(np.array(accuracy), np.zeros(len(accuracy))) is ends


def test_a_regression_ends_by_its_loss():
    stop, none = StopConfig(patience=2), np.full(3, NAN)
    assert stop.is_reached(none, np.array([1.0, 2.0, 1.5]))
    assert not stop.is_reached(none, np.array([1.0, 2.0, 0.5]))


def tensorboard_scalars(folder):
    """{(name, step): value}, read from the event files' records."""
    from tensorboardX.proto import event_pb2

    scalars = {}
    for path in folder.glob("tensorboard/events*"):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            event = event_pb2.Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]
            scalars |= {
                (v.tag, event.step): v.simple_value for v in event.summary.value
            }
    return scalars


def wandb_records(path):
    """Protobuf messages of an offline run: LevelDB's log format after 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, place, whole = path.read_bytes(), 7, b""
    while place + 7 <= len(content):
        if (room := 32768 - place % 32768) < 7:
            place += room
            continue
        _, size, kind = struct.unpack("<IHB", content[place : place + 7])
        whole += content[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(whole)
            whole = b""


@pytest.fixture(scope="module")
def followed(tmp_path_factory):
    """A run with all writers that one of them ended, and that went on; its records."""
    folder, records = tmp_path_factory.mktemp("writers"), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        patch.setenv("MLFLOW_TRACKING_URI", (folder / "store").as_uri())
        for report in (lambda record: record["interval"] < 2, records.append):
            names = ["csv", *INSTALLED, report]
            run = tsfl_jax.simulate(config_of(), workdir=folder / "run", writers=names)
            with (folder / "run" / "metrics.csv").open("a") as file:
                if not records:
                    assert run.summary["num_intervals"] == 2
                    assert "ended after interval 2 of 8" in run.summary["notes"][-1]
                    file.write("3,of a call that was not saved\n")
    return folder / "run", records


@pytest.mark.slow
def test_a_resumed_run_has_every_interval_once(followed):
    folder, records = followed
    rows = list(csv.DictReader((folder / "metrics.csv").read_text().splitlines()))
    lines = files.read_metrics(folder / "metrics.jsonl")
    assert [int(r["interval"]) for r in rows] == [*range(1, 9)]
    assert [float(r["test_loss"]) for r in rows] == [r["test_loss"] for r in lines]
    assert rows[0]["threshold"] == "" and float(rows[0]["wall_time"]) > 0
    assert [record["interval"] for record in records] == [*range(3, 9)]
    assert [r["test_loss"] for r in records] == [r["test_loss"] for r in lines[2:]]
    times = [record["wall_time"] for record in records]
    assert times == sorted(times) and times[0] > 0


@pytest.mark.skipif("tensorboard" not in INSTALLED, reason="not installed")
def test_tensorboard_gets_scalars_and_figures(followed):
    folder, _ = followed
    scalars = tensorboard_scalars(folder)
    lines = files.read_metrics(folder / "metrics.jsonl")
    for line in lines:
        assert scalars["test_loss", line["interval"]] == np.float32(line["test_loss"])
    assert ("curves", 8) in scalars


@pytest.mark.skipif("wandb" not in INSTALLED, reason="not installed")
def test_wandb_offline_has_the_run(followed):
    folder, _ = followed
    losses = {}
    for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        for record in wandb_records(path):
            items = {i.nested_key[0]: i.value_json for i in record.history.item}
            if "test_loss" in items:
                losses[record.history.step.num] = json.loads(items["test_loss"])
    lines = files.read_metrics(folder / "metrics.jsonl")
    assert losses == {r["interval"]: r["test_loss"] for r in lines}


@pytest.mark.parametrize("is_set", [False, True])
def test_mlflow_writes_into_the_run_s_folder_or_where_it_is_told(
    tmp_path, monkeypatch, is_set
):
    mlflow = mock.MagicMock()
    mlflow.is_tracking_uri_set.return_value = is_set
    client = mlflow.MlflowClient.return_value
    client.get_experiment_by_name.return_value = None
    client.create_run.return_value.info.run_id = "7"
    monkeypatch.setattr(writers, "package", lambda *_: mlflow)
    writers.writer_of("mlflow", tmp_path).start({"lr": 0.1}, 0)
    places = f"sqlite:///{tmp_path}/mlflow.db", f"file://{tmp_path}/mlruns"
    database, artifacts = (None, None) if is_set else places
    mlflow.MlflowClient.assert_called_once_with(database)
    client.create_experiment.assert_called_once_with("tsfl_jax", artifacts)


@pytest.mark.skipif("mlflow" not in INSTALLED, reason="not installed")
def test_mlflow_has_the_run(followed, monkeypatch):
    import mlflow

    folder, _ = followed
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = mlflow.MlflowClient((folder.parent / "store").as_uri())
    number = client.get_experiment_by_name("tsfl_jax").experiment_id
    (run,) = client.search_runs([number])  # the resumed one is the same
    assert run.data.params["lr"] == "0.03" and run.info.status == "FINISHED"
    losses = client.get_metric_history(run.info.run_id, "test_loss")
    lines = files.read_metrics(folder / "metrics.jsonl")
    assert {m.step: m.value for m in losses} == {
        r["interval"]: r["test_loss"] for r in lines
    }
    names = {item.path for item in client.list_artifacts(run.info.run_id)}
    assert {"curves.png", "summary.json"} <= names


def test_a_target_ends_the_run_with_that_interval_also_when_resumed(followed, tmp_path):
    lines = files.read_metrics(followed[0] / "metrics.jsonl")
    whole = np.array([line["test_accuracy"] for line in lines], np.float32)
    config = config_of({"stop.at": float(np.sort(whole)[len(whole) // 2])})
    first = int(np.argmax(whole >= config.stop.at)) + 1
    assert 2 < first < len(whole)
    with pytest.raises(KeyboardInterrupt):
        runner.run(runner.build(config), tmp_path, stop=lambda: True)
    for _ in range(2):  # and launched once more it stays as it is
        result = tsfl_jax.simulate(config, workdir=tmp_path)
        np.testing.assert_array_equal(result.history["test_accuracy"], whole[:first])
    config.stop.at = 0.0  # a longer run, from there on
    longer = tsfl_jax.simulate(config, workdir=tmp_path)
    np.testing.assert_array_equal(longer.history["test_accuracy"], whole)


def started(name, folder):
    opened = writers.Open([writers.writer_of(name, folder)])
    opened.start({}, 0)
    return opened


def test_writers_without_a_place_to_write_end_with_one_line(tmp_path, monkeypatch):
    (tmp_path / "metrics.csv").mkdir()
    with pytest.raises(UserError, match=r"cannot use .*metrics.csv: Is a directory"):
        started("csv", tmp_path)

    def start(settings, finished):
        raise ConnectionError("no server")

    custom = writers.Writer(lambda record: None, start)
    monkeypatch.setitem(writers.WRITERS, "wandb", lambda folder: custom)
    with pytest.raises(UserError, match="writer 'wandb': .*no server"):
        started("wandb", tmp_path)
    with pytest.raises(ConnectionError):  # of the user's own
        started(custom, tmp_path)


def test_links_are_replaced_and_not_passed_on(tmp_path):
    (tmp_path / "mine.png").symlink_to("/etc/hostname")
    (tmp_path / "theirs").write_text("keep\n")
    (tmp_path / "metrics.csv").symlink_to(tmp_path / "theirs")
    opened = started("csv", tmp_path)
    opened.report([{"interval": 1, "test_loss": 0.5}])
    assert (tmp_path / "metrics.csv").read_text() == "interval,test_loss\n1,0.5\n"
    assert (tmp_path / "theirs").read_text() == "keep\n"
    seen = []
    custom = writers.Writer(
        lambda record: None, end=lambda _, paths: seen.extend(paths)
    )
    started(custom, tmp_path).end({}, tmp_path)
    assert [path.name for path in seen] == ["curves.png", "participation.png"]


def test_what_is_no_writer_is_one_line():
    for choice, message in (("tensorbord", "did you mean 'te"), ("csv", "set workdir")):
        with pytest.raises(UserError, match=message):
            tsfl_jax.simulate(config_of(), writers=[choice])


def test_a_sweep_has_no_end_of_its_own():
    with pytest.raises(UserError, match="ends single runs"):
        tsfl_jax.sweep(config_of({"stop.at": 0.5}), {"seed": [0, 1]})
