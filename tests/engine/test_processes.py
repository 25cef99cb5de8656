"""Two processes on one machine through jax.distributed, against one process."""

import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parents[2]
SETTINGS = [
    "--config.num_clients=5",
    "--config.num_intervals=4",
    "--config.report_every=2",
    "--config.schedule.data_size=64",
    "--config.devices=0",
]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


def start(workdir, *more, devices=1, program=("launch.py",)):
    # One CPU device each, so that two processes are two devices.
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": str(devices)}
    command = [sys.executable, *program, f"--workdir={workdir}", *SETTINGS, *more]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process, code=0):
    out, err = process.communicate(timeout=240)
    assert process.returncode == code, err
    return out, err


def start_pair(workdirs, *more, **how):
    port = free_port()
    flags = [f"--coordinator=localhost:{port}", "--processes=2"]
    return [
        start(w, *flags, f"--process={i}", *more, **how) for i, w in enumerate(workdirs)
    ]


def pair(workdirs, *more):
    return [finish(process) for process in start_pair(workdirs, *more)]


def metrics(workdir):
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("processes")
    finish(start(root / "one"))
    return root, pair([root / "first", root / "second"])


@pytest.mark.slow
def test_two_processes_give_what_one_gives(runs):
    root, _ = runs
    one, two = metrics(root / "one"), metrics(root / "first")
    assert len(one) == len(two) == 4
    for a, b in zip(one, two, strict=True):
        np.testing.assert_allclose(a["train_loss"], b["train_loss"], rtol=1e-4)
        np.testing.assert_allclose(a["test_loss"], b["test_loss"], rtol=1e-4)
    summary = json.loads((root / "first" / "summary.json").read_text())
    assert summary["num_devices"] == 2
    a, b = (np.load(root / name / "model.npz") for name in ("one", "first"))
    for name in a.files:
        np.testing.assert_allclose(a[name], b[name], rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_only_the_first_process_writes_and_speaks(runs):
    root, ((out, err), (other_out, other_err)) = runs
    assert not (root / "second").exists()
    assert "samples/s" in out and "compiled in" in err
    assert "samples/s" not in other_out and "compiled in" not in other_err


@pytest.mark.slow
def test_two_processes_resume_together(runs):
    root, _ = runs
    newest = root / "first" / "checkpoints" / "4"
    assert newest.exists()
    for file in (newest / "arrays").rglob("*"):  # a damaged one gives way to 2
        if file.is_file():
            file.write_bytes(b"")
    whole = metrics(root / "first")
    (_, err), _ = pair([root / "first", root / "second"])
    assert "resuming after interval 2 of 4" in err
    assert metrics(root / "first") == whole


@pytest.mark.slow
def test_a_refusal_of_the_first_process_ends_the_others(runs):
    root, _ = runs
    both = start_pair([root / "first"] * 2, "--config.lr=0.5")
    (_, err), (_, other) = [finish(process, code=2) for process in both]
    assert "holds another experiment (lr: " in err
    # Either it hears the reason, or it finds that the connection has ended.
    assert "launch.py: process 0 " in other and "has stopped" in other


# A rule without estimates compiles in less time.
PLAIN = "--config.algorithm=fedavg"
LONG = ["--config.num_intervals=60", "--config.report_every=2", PLAIN]


def killed_in_interval_4(both, victim):
    """Kills one of two processes; (exit code, stderr, seconds) of the other."""
    lines = []
    for line in both[0].stderr:
        lines.append(line)
        if line.startswith("interval 4/"):
            break
    assert lines[-1].startswith("interval 4/"), lines
    both[victim].kill()
    begun = time.monotonic()
    _, err = both[1 - victim].communicate(timeout=60)
    seconds = time.monotonic() - begun
    both[victim].communicate()
    return both[1 - victim].returncode, err, seconds


@pytest.mark.slow
@pytest.mark.parametrize("victim", [pytest.param(1, marks=pytest.mark.slow), 0])
def test_a_lost_process_ends_the_other_with_one_line(tmp_path, victim):
    both = start_pair([tmp_path / "run"] * 2, *LONG)
    code, err, seconds = killed_in_interval_4(both, victim)
    assert code == 1 and seconds < 30
    assert f"launch.py: process {victim} of 2 exited without a message" in err
    assert f"with --workdir={tmp_path / 'run'}, resume" in err.splitlines()[-1]
    progress = ("interval ", "launch.py: process ")
    rest = [line for line in err.splitlines() if not line.startswith(progress)]
    assert victim == 0 or not rest, err  # process 0 tells its progress as well


@pytest.mark.slow
@pytest.mark.parametrize("victim", [1, 0])
def test_a_killed_pair_resumes_to_the_same_bits(tmp_path, victim):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    pair([whole, whole], *LONG)
    killed_in_interval_4(start_pair([cut, cut], *LONG), victim)
    (_, err), _ = pair([cut, cut], *LONG)
    resumed = int(re.search(r"resuming after interval (\d+) of 60", err).group(1))
    assert 2 <= resumed < 60  # the first chunk is saved, later ones when it is due
    assert metrics(cut) == metrics(whole)


@pytest.mark.slow  # above, a refusal passes its reason on in the same way
def test_a_process_that_cannot_save_ends_the_other_with_its_reason(tmp_path):
    # In its folder lies a file where the checkpoints would be.
    (tmp_path / "checkpoints").write_text("")
    begun = time.monotonic()
    both = start_pair([tmp_path] * 2, PLAIN)
    (_, err), (_, other) = [finish(process, code=2) for process in both]
    assert "checkpoint" in err.splitlines()[-1]
    assert "process 0 of 2 has stopped: " in other.splitlines()[-1]
    assert err.splitlines()[-1].removeprefix("launch.py: ") in other.splitlines()[-1]
    assert time.monotonic() - begun < 120  # most of it is to start


# Process 1 compiles the run for 40 s, which process 0 has in its cache, so to speak.
SLOW = """
import runpy, sys, time
import jax
real = jax.stages.Lowered.compile
def compile(self, *arguments, **options):
    if "module @jit_run" in self.as_text()[:300] and "--process=1" in sys.argv:
        time.sleep(40)
    return real(self, *arguments, **options)
jax.stages.Lowered.compile = compile
sys.path.insert(0, "")
sys.argv[0] = "launch.py"
runpy.run_path("launch.py", run_name="__main__")
"""


@pytest.mark.slow
def test_processes_start_training_together(tmp_path):
    # With two devices each, training needs connections that nothing before it had.
    both = start_pair([tmp_path] * 2, devices=2, program=("-c", SLOW))
    for process in both:
        finish(process)
    assert len(metrics(tmp_path)) == 4
