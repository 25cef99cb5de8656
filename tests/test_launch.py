"""The command line: results in plain sight, one clear line for every slip."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from tests import launches
from tests.launches import ROOT

SMALL = [
    "--config.num_intervals=2",
    "--config.num_clients=2",
    "--config.batch_size=4",
    "--config.schedule.data_size=16",
    "--config.model.name=mlp",
    "--config.report_every=1",
]


def launch_alone(*arguments, cwd):
    """As `launch`, in a process of its own from its start to its end."""
    command = [sys.executable, str(ROOT / "launch.py"), *map(str, arguments)]
    done = subprocess.run(
        command,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=300,
        env=launches.environment(),
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
def test_run_reports_progress_and_result(tmp_path):
    code, out, err = launch_alone(
        "--config=" + str(ROOT / "configs/smoke.py"), *SMALL, cwd=tmp_path
    )
    assert code == 0, err
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("smoke-dms-seed0-")
    assert "interval 1/2, accuracy" in err
    assert "interval 2/2, accuracy" in err
    assert "synthetic" in out
    assert "test accuracy" in out
    assert folder.name in out
    cores = len(os.sched_getaffinity(0))
    assert f"on {min(cores, 2)} device" in err, "the run must use every core"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["num_intervals"] == 2
    settings = json.loads((folder / "config.json").read_text())
    assert settings["num_clients"] == 2


def test_default_is_digits_and_the_same_workdir_resumes(tmp_path, launch):
    arguments = [*SMALL, "--workdir=here", "--config.algorithm=fedavg"]
    code, out, err = launch(*arguments, cwd=tmp_path)
    assert code == 0, err
    assert "digits" in out
    first = (tmp_path / "here/metrics.jsonl").read_bytes()
    code, _, err = launch(*arguments, cwd=tmp_path)
    assert code == 0, err
    assert "resuming after interval 2 of 2" in err
    assert (tmp_path / "here/metrics.jsonl").read_bytes() == first


SLIPS = {
    "misspelt config": (["--config=configs/smok.py"], ["no such file", "'smoke'"]),
    "misspelt field": (["--config.momentun=0.9"], ["did you mean 'momentum'"]),
    "wrong type": (["--config.lr=fast"], ["--config.lr=fast: 'fast' is not a number"]),
    "unwritable workdir": (["--workdir=/dev/null/x"], ["--workdir"]),
    "too much data": (["--config.num_clients=500"], ["training samples"]),
    "no data": (
        ["--config.data.name=fashion_mnist", "--config.data.download=False"],
        ["fashion_mnist", "data.dir"],
    ),
    "empty cache folder": (
        [*SMALL, "--config.compile_cache="],
        ["--config.compile_cache is empty: expected a folder"],
    ),
    "wrong value in a sweep": (
        [*SMALL, "--sweep=lr=0.1,-1"],
        ["run lr=-1.0: --config.lr=-1"],
    ),
}


@pytest.mark.parametrize("slip", SLIPS)
def test_slip_is_answered_in_one_line(slip, tmp_path, launch):
    arguments, words = SLIPS[slip]
    (tmp_path / "here").mkdir()
    data = f"--config.data.dir={tmp_path / 'data'}"
    code, out, err = launch(data, *arguments, cwd=tmp_path / "here")
    last = err.strip().splitlines()[-1]
    assert code == 2
    assert "Traceback" not in err
    assert last.startswith("launch.py: ")
    for word in words:
        assert word in last
    assert out == ""
    assert not list((tmp_path / "here").iterdir()), "a slip must not leave a folder"
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]


def test_a_sweep_from_the_command_line(tmp_path, launch):
    swept = ["--sweep=seed=0:2", "--sweep=algorithm=dms,fedavg", "--workdir=swept"]
    code, out, err = launch(*SMALL, *swept, cwd=tmp_path)
    assert code == 0, err
    assert "4 runs; results in swept" in err
    assert "interval 4/8, best accuracy " in err
    assert "interval 8/8, best accuracy " in err
    assert "| dms | 2 |" in out and "| fedavg | 2 |" in out
    rows = (tmp_path / "swept" / "results.jsonl").read_text().splitlines()
    # There are two clients.
    used = min(len(os.sched_getaffinity(0)), 2)
    assert {json.loads(row)["num_devices"] for row in rows} == {used}
    code, out, err = launch(*SMALL, *swept, cwd=tmp_path)
    assert code == 0 and "4 runs were finished already" in err


def test_settings_may_stand_before_the_config(tmp_path, launch):
    first = "--config.num_intervals=1", "--config.lr", "0.25"
    code, _, err = launch(
        *first, "--config=smoke", *SMALL[1:], "--workdir=w", cwd=tmp_path
    )
    assert code == 0, err
    settings = json.loads((tmp_path / "w" / "config.json").read_text())
    assert settings["lr"] == 0.25 and settings["num_intervals"] == 1


def test_a_sweep_into_a_folder_of_the_home(tmp_path, launch):
    """A shell does not expand the ~ of --workdir=~/swept."""
    place = os.path.relpath(tmp_path / "swept", pathlib.Path.home().resolve())
    swept = "--sweep=seed=0:2", f"--workdir=~/{place}"
    code, out, err = launch(*SMALL, *swept, cwd=tmp_path)
    assert code == 0, err
    assert (tmp_path / "swept" / "summary.md").read_text().strip() == out.strip()
