"""The command line: results in plain sight, one clear line for every slip."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from tests import launches
from tests.launches import ROOT
from tsfl_jax import config
from tsfl_jax.types import UserError
from tsfl_jax.validate import validate

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
    "misspelt config": (["--config=configs/smok.py"], ["no such file", "smoke.py"]),
    "misspelt field": (["--config.momentun=0.9"], ["momentum"]),
    "misspelt nested field": (["--config.data.nam=x"], ["data.name"]),
    "wrong type": (["--config.lr=fast"], ["--config.lr=fast: 'fast' is not a number"]),
    "no whole number": (
        ["--config.num_intervals", "2.5"],
        ["--config.num_intervals=2.5: '2.5' is not a whole number"],
    ),
    "no truth value": (
        ["--config.data.download=maybe"],
        ["--config.data.download=maybe: 'maybe' is neither True nor False"],
    ),
    "misspelt flag": (["--workdri=x"], ["workdir"]),
    "setting without config": (
        ["--lr=0.1"],
        ["--lr: settings begin with config: --config.lr=0.1"],
    ),
    "misspelt config of a setting": (
        ["--confg.lr=0.1"],
        ["--confg.lr: there is no such flag; did you mean --config.lr?"],
    ),
    "setting of a section without config": (
        ["--alpha", "0.1"],
        ["--config.partition.alpha"],
    ),
    "samples without a file": (
        [*SMALL, "--sweep=seed=0:2", "--samples=3"],
        ["--samples=3: expected at least 1, with --sweep_file"],
    ),
    "no sweep file": (
        [*SMALL, "--sweep_file=none.yaml"],
        ["--sweep_file=none.yaml: cannot be read"],
    ),
    "stray word": (["mnist"], ["mnist", "--config.lr"]),
    "no value": (["--config.lr"], ["lr"]),
    "two configs": (["--config=a.py", "--config=b.py"], ["--config"]),
    "no numbers": (["--config.schedule.tau=(1,a)"], ["schedule.tau"]),
    "misspelt data set": (["--config.data.name=minst"], ["did you mean 'mnist'"]),
    "no data": (
        ["--config.data.name=fashion_mnist", "--config.data.download=False"],
        ["fashion_mnist", "data.dir"],
    ),
    "missing npz": (
        ["--config.data.name=npz", "--config.data.file=no.npz"],
        ["no.npz"],
    ),
    "too much data": (["--config.num_clients=500"], ["training samples"]),
    "unwritable workdir": (["--workdir=/dev/null/x"], ["--workdir"]),
    "misspelt field of a sweep": (
        [*SMALL, "--sweep=lrr=1"],
        ["--sweep=lrr=1: there is no such setting; did you mean 'lr'"],
    ),
    "sweep without values": (
        [*SMALL, "--sweep=seed"],
        ["expected setting=values, such as seed=0:10"],
    ),
    "wrong value in a sweep": (
        [*SMALL, "--sweep=lr=0.1,-1"],
        ["lane lr=-1.0: --config.lr=-1"],
    ),
    "repeated tuple": (
        [
            *("--config.schedule.kind=explicit", "--config.schedule.tau=(1,4)"),
            *("--config.schedule.tau", "(9,-2)"),
        ],
        ["--config.schedule.tau=(9, -2)"],
    ),
    "far too many devices": (
        ["--config.devices=100000"],
        ["--config.devices=100000: expected at most 1024"],
    ),
    "empty cache folder": (
        [*SMALL, "--config.compile_cache="],
        ["--config.compile_cache is empty: expected a folder"],
    ),
    "process of how many": (["--process=1"], ["--process=1: say how many"]),
    "coordinator of how many": (
        ["--coordinator=localhost:1"],
        ["--coordinator=localhost:1: say how many", "--processes"],
    ),
    "no cluster": (["--processes=0"], ["--processes=0: JAX cannot connect them"]),
    "fewer processes": (["--processes=-1"], ["--processes=-1: expected at least 0"]),
    "second of one": (["--processes=1", "--process=1"], ["--process=1: expected 0"]),
    "third of two": (
        ["--processes=2", "--process=2"],
        ["--process=2: expected 0 to 1 with --processes=2"],
    ),
    "no coordinator": (["--processes=2"], ["--coordinator=: expected host:port"]),
    "port in letters": (
        ["--processes=2", "--process=1", "--coordinator=abc:def"],
        ["--coordinator=abc:def: expected host:port"],
    ),
    "port out of range": (
        ["--processes=2", "--coordinator=localhost:99999"],
        ["--coordinator=localhost:99999", "a port from 1 to 65535"],
    ),
    "no patience": (
        ["--processes=2", "--coordinator=localhost:9911", "--join_timeout=-1"],
        ["--join_timeout=-1.0: expected seconds > 0"],
    ),
    "sweep in two processes": (
        ["--processes=2", "--sweep=seed=0:2"],
        ["a sweep runs in one process"],
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


@pytest.mark.slow
def test_total_loss_ends_with_an_error_and_the_last_good_model(tmp_path, launch):
    code, out, err = launch(*SMALL, "--config.lr=1e30", "--workdir=lost", cwd=tmp_path)
    assert code == 1
    assert "Traceback" not in err
    assert "in interval 1" in err.splitlines()[-1]
    assert (tmp_path / "lost/model.npz").is_file()
    assert "no model was finite in interval 1" in out


def changed(name, value) -> config.Config:
    settings = config.Config()
    target = settings
    *path, last = name.split(".")
    for part in path:
        target = getattr(target, part)
    setattr(target, last, value)
    return settings


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("algorithm", "fedprx", "fedprox"),
        ("model.name", "vgg", "vgg11"),
        ("model.norm", "layer", "one of"),
        ("partition.kind", "dirichlett", "dirichlet"),
        ("schedule.kind", "case4", "case"),
        ("schedule.iteration", "epoch", "pass"),
        ("num_clients", 0, ">= 1"),
        ("num_intervals", -3, ">= 1"),
        ("batch_size", 0, ">= 1"),
        ("lr", 0.0, "> 0"),
        ("lr", float("nan"), "> 0"),
        ("lr", float("inf"), "finite"),
        ("momentum", 1.0, "[0, 1)"),
        ("gamma", -0.1, "[0, 1)"),
        ("schedule.dropout", 1.0, "[0, 1)"),
        ("partition.alpha", 0.0, "> 0"),
        ("dms.weight_limit", 0.5, "at least 1"),
        ("constants.grad_variance", 0.0, "not 0"),
        ("seed", True, "expected int"),
        ("seed", 1.5, "expected int"),
        ("seed", -1, ">= 0"),
        ("lr", "0.1", "expected float"),
        ("data", {"name": "mnist"}, "DataConfig"),
        ("data.name", 3, "expected str"),
        ("schedule.tau", (1, 2), "would be ignored"),
        ("schedule.trace", "x.csv", "would be ignored"),
        ("timeline.buffer", 3, "choose a framework"),
        ("data.file", "x.npz", "would be ignored"),
        ("model.norm", "batch", "would be ignored"),
        ("schedule.data_size", 10**12, "<= 2147483647"),
        ("momentun", 0.5, "momentum"),
        ("data.shape", ("a", 8), "whole numbers"),
    ],
)
def test_wrong_settings(name, value, words):
    with pytest.raises(UserError) as error:
        validate(changed(name, value))
    message = str(error.value)
    assert words in message
    assert name in message
    assert "\n" not in message


def test_good_settings_pass():
    validate(config.Config())
    validate(changed("lr", 1))  # an int will do for a float
    validate(changed("data.name", "svhn"))


def test_a_sweep_from_the_command_line(tmp_path, launch):
    swept = ["--sweep=seed=0:2", "--sweep=algorithm=dms,fedavg", "--workdir=swept"]
    code, out, err = launch(*SMALL, *swept, cwd=tmp_path)
    assert code == 0, err
    assert "4 lanes; results in swept" in err
    assert "0 of 4 lanes, 4 more at interval 1/2, best " in err
    assert "4 of 4 lanes, best " in err
    assert "| dms | 2 |" in out and "| fedavg | 2 |" in out
    rows = (tmp_path / "swept" / "results.jsonl").read_text().splitlines()
    # There are two clients.
    used = min(len(os.sched_getaffinity(0)), 2)
    assert {json.loads(row)["num_devices"] for row in rows} == {used}
    code, out, err = launch(*SMALL, *swept, cwd=tmp_path)
    assert code == 0 and "4 lanes were finished already" in err


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
