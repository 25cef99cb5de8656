"""Shards: who does which runs; in any order they end with the table of one process."""

import contextlib
import importlib.util
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from tests.experiment.test_sweep import SWEPT, small
from tsfl_jax.experiment import lanes, ray_workers, shards, sweep_folder, sweeps
from tsfl_jax.report import files
from tsfl_jax.types import UserError

ROOT = pathlib.Path(__file__).parents[2]
SMALL = {"algorithm": ["dms", "fedavg", "fedprox"], "seed": [0, 3]}  # two programs


def table(folder):
    """The rows of a sweep without what a clock said, and the lines of all histories."""
    rows = map(json.loads, (folder / "results.jsonl").read_text().splitlines())
    kept = [{k: v for k, v in row.items() if k != "seconds"} for row in rows]
    return kept, (folder / "history.csv").read_text()


@pytest.mark.parametrize("text", ["", "1", "2/2", "-1/2", "0/0", "1/2/3", "a/b"])
def test_what_is_no_shard(text):
    with pytest.raises(UserError, match=r"expected i/n with 0 <= i < n"):
        shards.parse(text)


def test_division_by_hand():
    assert shards.parse("1/4") == (1, 4)
    # The cut at 5 is at a boundary; that of 4 and 6 runs is 1 ≤ 10/8 away from it.
    assert shards.divide([[0, 2, 4, 6, 8], [1, 3, 5, 7, 9]], 2) == [
        [0, 2, 4, 6, 8],
        [1, 3, 5, 7, 9],
    ]
    assert shards.divide([[0, 1, 2, 3], [4, 5, 6, 7, 8, 9]], 2)[0] == [0, 1, 2, 3]
    # Three runs and seven: the boundary is 2 > 10/8 away, so the larger one is cut.
    assert shards.divide([[0, 1, 2], [*range(3, 10)]], 2)[0] == [0, 1, 2, 3, 4]
    assert shards.divide([[0, 1]], 4) == [[], [0], [1], []]


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 40])
def test_each_run_is_in_one_shard_and_shards_are_balanced(count):
    groups = [[*range(0, 24, 2)], [1, 3, 5], [*range(7, 24, 2)]]
    parts = shards.divide(groups, count)
    assert sorted(sum(parts, [])) == [*range(24)] and len(parts) == count
    if count <= 8:
        assert all(0.5 <= len(part) * count / 24 <= 1.5 for part in parts)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    sweeps.run(small(devices=1), SMALL, workdir=folder)
    return folder


def test_shards_in_any_order_make_the_table_of_one_process(
    whole, tmp_path, monkeypatch, caplog
):
    trained, make = [], lanes.make_lanes

    def counted(group, several, count):
        trained.append(len(several))
        return make(group, several, count)

    monkeypatch.setattr(lanes, "make_lanes", counted)
    given = (small(devices=1), SMALL)
    assert shards.run(*given, (2, 3), workdir=tmp_path) is None
    assert shards.run(*given, (0, 3), workdir=tmp_path) is None
    assert sum(trained) == 4 and not (tmp_path / "summary.md").exists()
    assert shards.collect(*given, workdir=tmp_path) is None  # what there is
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == 4
    assert shards.run(*given, (0, 3), workdir=tmp_path) is None  # a restart
    assert sum(trained) == 4, "work was done twice"
    result = shards.run(*given, (1, 3), workdir=tmp_path)
    assert sum(trained) == 6 and result is not None and len(result.rows) == 6
    assert table(tmp_path) == table(whole)
    (tmp_path / "sweep.json").unlink()  # as if killed before the tables were whole
    assert shards.collect(*given, workdir=tmp_path) is not None
    assert shards.run(*given, (1, 2), workdir=tmp_path) is None  # divided otherwise
    assert sum(trained) == 6 and table(tmp_path) == table(whole)


def test_a_folder_in_use_or_of_another_sweep_is_refused(tmp_path):
    config, swept = small(devices=1), {"seed": [0, 1]}
    every = sweeps.make(config, swept, {}, workdir=tmp_path)
    with sweep_folder.shard(tmp_path, every.names, 0, 2):
        with pytest.raises(UserError, match=r"in use \(shard-0-of-2\)"):
            shards.run(config, swept, (0, 2), workdir=tmp_path)
        with pytest.raises(UserError, match="in use"):  # otherwise divided
            shards.run(config, swept, (0, 3), workdir=tmp_path)
        with pytest.raises(UserError, match="in use"):
            sweeps.run(config, swept, workdir=tmp_path)
    with pytest.raises(UserError, match="holds the shards of another sweep"):
        shards.run(config, {"seed": [0, 2]}, (0, 2), workdir=tmp_path)
    with pytest.raises(UserError, match="has none of these 2 runs"):
        shards.collect(config, swept, workdir=tmp_path)
    with pytest.raises(UserError, match="is not the folder of a sweep"):
        shards.collect(config, swept, workdir=tmp_path / "elsewhere")
    assert not (tmp_path / "elsewhere").exists()


def test_ray_that_is_missing_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"pip install 'tsfl_jax\[ray\]'"):
        ray_workers.run(small(), {"seed": [0, 1]}, workdir=tmp_path)
    with pytest.raises(UserError, match="needs a workdir"):
        sweeps.sweep(small(), {"seed": [0, 1]}, ray=True)


RUN = """
import sys
import tsfl_jax
from tests.experiment.test_sweep import SWEPT, small
options = {"workdir": sys.argv[1], "runs_per_call": 1, "ray": True}
print(len(tsfl_jax.sweep(small(devices=1), SWEPT, **options).rows))
"""


def workers(ancestor):
    """Process ids of Ray's workers with a shard, below a process."""
    listed = subprocess.run(
        ["ps", "-eo", "pid=,ppid=,args="], capture_output=True, text=True, check=True
    )
    lines = [line.split(None, 2) for line in listed.stdout.splitlines()]
    below, before = {ancestor}, set()
    while below != before:
        before = below
        below = below | {int(pid) for pid, parent, *_ in lines if int(parent) in below}
    wanted = [int(p) for p, _, *args in lines if args and "ray::_work" in args[0]]
    return [pid for pid in wanted if pid in below]


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("ray"), reason="needs Ray")
@pytest.mark.skipif(not os.path.isdir("/proc"), reason="needs ps of Linux")
def test_a_killed_worker_of_ray_is_replaced(tmp_path):
    sweeps.run(small(devices=1), SWEPT, workdir=tmp_path / "one", runs_per_call=1)
    folder, killed = tmp_path / "ray", None
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, str(folder)],
        cwd=ROOT,
        env=os.environ | {"RAY_USAGE_STATS_ENABLED": "0", "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        while killed is None and process.poll() is None:
            there = workers(process.pid)
            if there and any(folder.glob("lanes/*.npz")):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(there[0], signal.SIGKILL)
                    killed = there[0]
            time.sleep(0.02)
        out, _ = process.communicate(timeout=300)
    finally:
        process.terminate()
    assert killed is not None and process.returncode == 0
    assert out.split()[-1] == "16"
    division = files.read_json(folder / sweep_folder.DIVISION)
    assert division is not None and division["shards"] > 1
    assert table(folder) == table(tmp_path / "one")
