"""Sweeps in shards: division, locks, and the bits of a sweep in one process."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tsfl_jax
from tests import problems
from tsfl_jax.run import lanes, shards, sweeps
from tsfl_jax.types import UserError

ROOT = pathlib.Path(__file__).parents[2]
POINTS = [{"seed": s, "algorithm": a} for s in (0, 1) for a in ("fedavg", "fedbuff")]
CONFIG = problems.small(num_intervals=4, schedule__data_size=32)


@pytest.mark.parametrize(
    ("groups", "count", "parts"),
    [
        # Cuts at 2 and 4; the boundary at 3 is further away than 6/12.
        ([[0, 2, 4], [1, 3, 5]], 3, [[0, 2], [1, 4], [3, 5]]),
        # The cut at 4 moves to 5, which is 8/8 away; to 6 it would not.
        ([[0, 1, 2, 3, 4], [5, 6, 7]], 2, [[0, 1, 2, 3, 4], [5, 6, 7]]),
        ([[0, 1, 2, 3, 4, 5], [6, 7]], 2, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ([[0], [1]], 4, [[], [0], [1], []]),
    ],
)
def test_division_by_hand(groups, count, parts):
    assert shards.divide(groups, count) == parts


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(1, 12))
def test_every_run_is_in_one_shard_and_shards_are_alike(sizes, count):
    runs = iter(range(sum(sizes)))
    groups = [[next(runs) for _ in range(size)] for size in sizes]
    parts = shards.divide(groups, count)
    assert len(parts) == count
    assert sorted(sum(parts, [])) == list(range(sum(sizes)))
    mean = sum(sizes) / count
    assert all(mean / 2 - 1 <= len(part) <= 1.5 * mean + 1 for part in parts)


@pytest.mark.parametrize("text", ["1", "2/2", "-1/2", "a/b"])
def test_other_shards_are_refused(text):
    with pytest.raises(UserError, match="expected i/n"):
        shards.parse(text)


def test_locks(tmp_path):
    folder = sweeps.open_folder(tmp_path, None)
    with shards.hold(folder, 0, 2):
        with shards.hold(folder, 1, 2):
            pass
        for again in ((0, 2), (0, 3)):
            with (
                pytest.raises(UserError, match="in use .shard-0-of-2."),
                shards.hold(folder, *again),
            ):
                pass
        with pytest.raises(UserError, match="in use"), contextlib.ExitStack() as stack:
            sweeps.open_folder(folder, stack)
    # Nobody works there any more.
    with shards.hold(folder, 2, 3):
        pass
    with contextlib.ExitStack() as stack:
        sweeps.open_folder(folder, stack)


def test_shards_in_any_order_and_stopped_ones(tmp_path, monkeypatch):
    whole, folder, trained = tmp_path / "whole", tmp_path / "shards", []
    tsfl_jax.sweep(CONFIG, POINTS, workdir=whole, runs_per_call=1)
    make = lanes.make_arrays

    def counted(group, several, count):
        trained.append(len(several))
        return make(group, several, count)

    monkeypatch.setattr(lanes, "make_arrays", counted)
    options = {"workdir": folder, "runs_per_call": 1}
    with pytest.raises(UserError, match="not the folder of a sweep"):
        shards.collect(CONFIG, POINTS, workdir=folder)
    asked = []

    def stop():  # after the first chunk of its second run
        asked.append(1)
        return len(asked) == 3

    with pytest.raises(KeyboardInterrupt):
        shards.run(CONFIG, POINTS, (1, 2), **options, stop=stop)
    assert shards.collect(CONFIG, POINTS, workdir=folder) is None
    assert "1 of 4 runs so far" in (folder / "summary.md").read_text()
    assert shards.run(CONFIG, POINTS, (1, 2), **options) is None
    assert not (folder / "sweep.json").exists()
    assert trained == [1, 1, 1]  # of the second run only what was missing
    result = shards.run(CONFIG, POINTS, (0, 2), **options)
    assert result is not None
    assert [row["run"] for row in result.rows] == [0, 1, 2, 3]
    problems.same_sweep(folder, whole)
    before = (folder / "sweep.json").stat().st_mtime_ns
    for index in (0, 1):
        assert shards.run(CONFIG, POINTS, (index, 2), **options) is None
    assert (folder / "sweep.json").stat().st_mtime_ns == before
    assert len(trained) == 5
    again = shards.collect(CONFIG, POINTS, workdir=folder)
    assert again is not None
    np.testing.assert_array_equal(again.history["rho"], result.history["rho"])
    # More shards than runs: some have nothing to do.
    assert shards.run(CONFIG, POINTS, (0, 9), **options) is None
    assert len(trained) == 5


def test_ray_without_a_folder_and_where_it_is_missing(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="needs a workdir"):
        tsfl_jax.sweep(CONFIG, POINTS, ray=True)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"pip install 'tsfl_jax\[ray\]'"):
        tsfl_jax.sweep(CONFIG, POINTS, ray=True, workdir=tmp_path)


# One-lane calls, so that a killed worker has runs behind it and before it.
SWEEP = """
import sys, ray, tsfl_jax
from tests.problems import small
from tsfl_jax import registry
workdir, workers = sys.argv[1], int(sys.argv[2])
for source in ("one.py", "two"):  # a file by a relative path, and a module
    registry.load(source)
if workers:
    ray.init(num_cpus=workers, log_to_driver=False)
rules = ("dms", "one", "two")
points = [{"seed": s, "algorithm": a} for s in range(4) for a in rules]
config = small(num_intervals=400, report_every=100, schedule__data_size=32)
options = {"workdir": workdir, "runs_per_call": 1, "ray": bool(workers)}
result = tsfl_jax.sweep(config, points, verbose=True, **options)
assert [row["run"] for row in result.rows] == list(range(12))
"""


def start(workdir, workers):
    command = [sys.executable, "-c", SWEEP, str(workdir), str(workers)]
    rule = "tsfl_jax.register('algorithm', __name__, lambda info: info.tau**0.5)"
    for name in ("one", "two"):
        (workdir.parent / f"{name}.py").write_text(f"import tsfl_jax\n{rule}\n")
    path = os.pathsep.join([str(ROOT), str(workdir.parent)])
    known = {"PYTHONPATH": path, "TSFL_TEST": str(workdir), "JAX_PLATFORMS": "cpu"}
    known |= {"RAY_USAGE_STATS_ENABLED": "0"}
    options = {"cwd": workdir.parent, "env": os.environ | known}
    with open(f"{workdir}.log", "w") as log:
        return subprocess.Popen(command, **options, stderr=log)


def workers_of(workdir) -> list[int]:
    """Processes of this sweep's Ray workers that run a shard."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            own = f"TSFL_TEST={workdir}".encode() in (path / "environ").read_bytes()
            if own and b"ray::_work" in (path / "cmdline").read_bytes():
                found.append(int(path.name))
    return found


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ray_workers_of_which_one_is_killed(tmp_path):
    pytest.importorskip("ray", reason="the extra ray")
    whole, folder = tmp_path / "whole", tmp_path / "ray"
    log = tmp_path / "ray.log"
    with start(whole, 0) as alone:
        assert alone.wait(timeout=300) == 0
    driver, end = start(folder, 3), time.monotonic() + 300
    with driver, contextlib.ExitStack() as stack:
        stack.callback(driver.kill)
        while not (there := [*folder.glob("lanes/*.npz")]) or not workers_of(folder):
            assert driver.poll() is None and time.monotonic() < end
            time.sleep(0.01)
        killed = workers_of(folder)
        assert len(killed) == 3
        os.kill(killed[0], signal.SIGKILL)
        assert len(there) < 12
        replaced = set()
        while driver.poll() is None and time.monotonic() < end:
            replaced |= {*workers_of(folder)} - {*killed}
            time.sleep(0.05)
        text = log.read_text()
        assert driver.returncode == 0, text
    assert replaced and "3 Ray workers" in text and text.count("has ended") == 3
    problems.same_sweep(folder, whole)
