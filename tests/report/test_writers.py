"""Writers follow a run; a run ends early by its scores or by a writer's answer."""

import csv
import json
import struct

import numpy as np
import pytest

import tsfl_jax
from tests.report.test_tensorboard import scalars
from tsfl_jax.config import Config
from tsfl_jax.experiment import runner
from tsfl_jax.report import files, tensorboard, writers
from tsfl_jax.stopping import StopConfig, reached
from tsfl_jax.types import UserError

NAN = float("nan")


def config_of(**settings):
    config = Config(num_intervals=8, num_clients=4, batch_size=8, lr=0.03)
    config.algorithm, config.report_every = "fedavg", 3
    config.schedule.data_size, config.partition.kind = 32, "iid"
    config.data.name, config.model.name = "digits", "mlp"
    for name, value in settings.items():
        part, _, last = name.rpartition("__")
        setattr(getattr(config, part) if part else config, last, value)
    return config


def interrupted(config, folder, **more):
    with pytest.raises(KeyboardInterrupt):
        runner.run(runner.build(config), folder, stop=lambda: True, **more)


@pytest.mark.parametrize(
    ("at", "patience", "accuracy", "want"),
    [
        (0.5, 0, [0.4, 0.49], False),
        (0.5, 0, [0.5, 0.1], True),
        (0.5, 0, [NAN, 0.6, NAN], True),
        (0.0, 2, [0.4, 0.3], False),
        (0.0, 2, [0.4, 0.3, NAN, 0.4], True),  # equal is not better
        (0.0, 2, [0.4, 0.3, 0.5], False),
        (0.0, 1, [], False),
        (0.0, 0, [0.9, 0.1, 0.1, 0.1], False),
    ],
)
def test_when_a_run_ends(at, patience, accuracy, want):
    given = np.array(accuracy)
    stop = StopConfig(at=at, patience=patience)
    assert reached(stop, given, np.zeros(len(given))) is want


def test_a_regression_ends_by_its_loss():
    none = np.full(3, NAN)
    stop = StopConfig(patience=2)
    assert reached(stop, none, np.array([1.0, 2.0, 1.5]))
    assert not reached(stop, none, np.array([1.0, 2.0, 0.5]))


def test_a_function_gets_every_interval_once_and_may_end_the_run():
    seen = []
    whole = tsfl_jax.simulate(config_of(), writers=[seen.append])
    assert [r["interval"] for r in seen] == [*range(1, 9)]
    np.testing.assert_allclose(
        [r["test_accuracy"] for r in seen], whole.history["test_accuracy"]
    )
    times = [r["wall_time"] for r in seen]
    assert times == sorted(times) and times[0] > 0
    short = tsfl_jax.simulate(config_of(), writers=[lambda r: r["interval"] < 4])
    # Two intervals a call: 4 of 8.
    assert short.summary["num_intervals"] == 4
    assert "ended after interval 4 of 8" in short.summary["notes"][-1]
    np.testing.assert_array_equal(
        short.history["test_loss"], whole.history["test_loss"][:4]
    )


@pytest.mark.parametrize("framework", ["none", "fedbuff"])
def test_a_target_ends_the_run_with_that_interval_also_when_resumed(
    framework, tmp_path
):
    config = config_of(timeline__framework=framework, num_intervals=10)
    if framework == "fedbuff":
        config.timeline.buffer = 2
    whole = tsfl_jax.simulate(config).history["test_accuracy"]
    config.stop.at = float(np.sort(whole)[len(whole) // 2])
    first = int(np.argmax(whole >= config.stop.at)) + 1
    assert first < len(whole)
    once = tsfl_jax.simulate(config, workdir=tmp_path / "once")
    assert len(once.history["test_accuracy"]) == first
    interrupted(config, tmp_path / "twice")
    again = tsfl_jax.simulate(config, workdir=tmp_path / "twice")
    for name in once.params["params"]["Dense_0"]:
        np.testing.assert_array_equal(
            once.params["params"]["Dense_0"][name],
            again.params["params"]["Dense_0"][name],
        )
    # And launched once more it stays as it is.
    same = tsfl_jax.simulate(config, workdir=tmp_path / "once")
    np.testing.assert_array_equal(
        same.history["test_accuracy"], once.history["test_accuracy"]
    )
    config.stop.at = 0.0  # a longer run, from there on
    longer = tsfl_jax.simulate(config, workdir=tmp_path / "once")
    np.testing.assert_array_equal(longer.history["test_accuracy"], whole)


def test_csv_of_an_interrupted_run_has_every_interval_once(tmp_path):
    interrupted(config_of(), tmp_path / "run", writers=["csv"])
    with (tmp_path / "run" / "metrics.csv").open("a") as file:
        file.write("3,of a call that was not saved\n")
    tsfl_jax.simulate(config_of(), workdir=tmp_path / "run", writers=["csv"])
    text = (tmp_path / "run" / "metrics.csv").read_text()
    rows = list(csv.DictReader(text.splitlines()))
    lines = files.read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [int(r["interval"]) for r in rows] == [*range(1, 9)]
    assert [float(r["test_loss"]) for r in rows] == [r["test_loss"] for r in lines]
    assert rows[0]["threshold"] == "" and float(rows[0]["wall_time"]) > 0


def test_metrics_csv_replaces_a_link(tmp_path):
    (tmp_path / "theirs").write_text("keep\n")
    (tmp_path / "metrics.csv").symlink_to(tmp_path / "theirs")
    writer = writers.csv_writer(tmp_path)
    writer.start({}, 0)
    writer.report({"interval": 1, "test_loss": 0.5})
    assert (tmp_path / "metrics.csv").read_text() == "interval,test_loss\n1,0.5\n"
    assert (tmp_path / "theirs").read_text() == "keep\n"


def test_writers_without_a_place_to_write_end_with_one_line(tmp_path, monkeypatch):
    def opened(name, finished=0):
        return writers.opened([name], tmp_path, {}, finished)

    pytest.importorskip("tensorboardX")
    (tmp_path / "metrics.csv").mkdir()
    (tmp_path / "tensorboard").write_text("a file")
    with pytest.raises(UserError, match=r"cannot use .*metrics.csv: Is a directory"):
        opened("csv")
    with pytest.raises(UserError, match=r"writer 'tensorboard': failed in .*Not a d"):
        opened("tensorboard")
    files.write_metrics(tmp_path / "metrics.jsonl", [{"interval": 1}])
    with pytest.raises(UserError, match=r"cannot use .*tensorboard: Not a directory"):
        tensorboard.write_events(tmp_path)
    (tmp_path / "metrics.csv").rmdir()
    (tmp_path / "metrics.csv").write_bytes(b"\xff\n")
    with pytest.raises(UserError, match=r"writer 'csv': failed in .*'utf-8'"):
        opened("csv", finished=1)
    record = {"interval": 1}
    following = opened("csv")
    (tmp_path / "metrics.csv").unlink()
    (tmp_path / "metrics.csv").mkdir()
    with pytest.raises(UserError, match=r"writer 'csv': failed in .*Is a directory"):
        following.report([record])

    def start(settings, finished):
        raise ConnectionError("no server")

    made = writers.Writer(lambda record: None, start)
    for name in ("wandb", "mlflow"):
        monkeypatch.setitem(writers.WRITERS, name, lambda folder: made)
        with pytest.raises(UserError, match=f"writer '{name}': .*no server"):
            opened(name)
    with pytest.raises(ConnectionError):  # of the user's own
        writers.opened([made], tmp_path, {}, 0)


def test_only_the_run_s_own_figures_are_passed_on(tmp_path):
    (tmp_path / "mine.png").symlink_to("/etc/hostname")
    seen = []
    ended = writers.Writer(lambda record: None, end=lambda _, paths: seen.append(paths))
    writers.opened([ended], tmp_path, {}, 0).end({}, tmp_path)
    assert [path.name for path in seen[0]] == ["curves.png", "participation.png"]


def test_tensorboard_gets_scalars_and_figures(tmp_path):
    pytest.importorskip("tensorboardX")
    tsfl_jax.simulate(config_of(), workdir=tmp_path, writers=["tensorboard"])
    found = scalars(tmp_path / "tensorboard")
    lines = files.read_metrics(tmp_path / "metrics.jsonl")
    for line in lines:
        assert found["test_loss", line["interval"]] == np.float32(line["test_loss"])
    assert ("curves", 8) in found


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


def test_wandb_offline_has_the_run(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    tsfl_jax.simulate(config_of(), workdir=tmp_path, writers=["wandb"])
    (path,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    found = {}
    for record in wandb_records(path):
        items = {i.nested_key[0]: json.loads(i.value_json) for i in record.history.item}
        if "test_loss" in items:
            found[record.history.step.num] = items["test_loss"]
    lines = files.read_metrics(tmp_path / "metrics.jsonl")
    assert found == {r["interval"]: r["test_loss"] for r in lines}


def test_mlflow_has_the_run(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    interrupted(config_of(), tmp_path / "run", writers=["mlflow"])
    tsfl_jax.simulate(config_of(), workdir=tmp_path / "run", writers=["mlflow"])
    client = mlflow.MlflowClient()
    number = client.get_experiment_by_name("tsfl_jax").experiment_id
    (run,) = client.search_runs([number])  # the resumed one is the same
    assert run.data.params["lr"] == "0.03" and run.info.status == "FINISHED"
    found = client.get_metric_history(run.info.run_id, "test_loss")
    lines = files.read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert {m.step: m.value for m in found} == {
        r["interval"]: r["test_loss"] for r in lines
    }
    names = {item.path for item in client.list_artifacts(run.info.run_id)}
    assert {"curves.png", "summary.json"} <= names


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (["tensorbord"], "did you mean 'tensorboard'"),
        ([3], "3 is no writer"),
        (["csv"], "set workdir"),
    ],
)
def test_what_is_no_writer_is_one_line(given, why):
    with pytest.raises(UserError, match=why):
        tsfl_jax.simulate(config_of(), writers=given)


def test_a_sweep_has_no_end_of_its_own():
    with pytest.raises(UserError, match="ends single runs"):
        tsfl_jax.sweep(config_of(stop__at=0.5), {"seed": [0, 1]})
    assert sorted(writers.WRITERS) == ["csv", "mlflow", "tensorboard", "wandb"]
