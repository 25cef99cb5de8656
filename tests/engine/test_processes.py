"""Two processes on one machine through jax.distributed, against one process."""

import json
import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys

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


def start(workdir, *more, devices=1, program=("launch.py",), launcher=()):
    # One CPU device each, so that two processes are two devices.
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": str(devices)}
    command = [*launcher, sys.executable, *program, f"--workdir={workdir}"]
    command += [*SETTINGS, *more]
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
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs Open MPI")
def test_mpirun_gives_address_and_numbers(tmp_path):
    launcher = ["mpirun", "--oversubscribe", "-n", "2"]
    if os.geteuid() == 0:
        launcher.insert(1, "--allow-run-as-root")
    two, one = tmp_path / "two", tmp_path / "one"
    finish(start(two, "--processes=0", launcher=launcher))
    finish(start(one, devices=2))
    assert metrics(two) == metrics(one)


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
    newest = root / "first" / "checkpoints" / "4.npz"
    newest.write_bytes(newest.read_bytes()[:500])  # a damaged one gives way to 2
    whole = metrics(root / "first")
    (_, err), _ = pair([root / "first", root / "second"])
    assert "resuming after interval 2 of 4" in err
    assert metrics(root / "first") == whole


@pytest.mark.slow
def test_a_refusal_of_the_first_process_ends_the_others(runs):
    root, _ = runs
    both = start_pair([root / "first"] * 2, "--config.lr=0.5")
    (_, err), (_, other) = [finish(process, code=2) for process in both]
    assert "holds a checkpoint of another experiment (lr: " in err
    assert "launch.py: process 0 has stopped" in other


# A rule without estimates compiles in less time.
PLAIN = "--config.algorithm=fedavg"
LONG = ["--config.num_intervals=60", "--config.report_every=2", PLAIN]


@pytest.mark.slow
@pytest.mark.parametrize("victim", [1, 0])
def test_a_killed_pair_resumes_to_the_same_bits(tmp_path, victim):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    pair([whole, whole], *LONG)
    both = start_pair([cut, cut], *LONG)
    for line in both[0].stderr:
        if line.startswith("interval 4/"):
            break
    both[victim].kill()
    # JAX ends the other at once, or after 100 s without heartbeats; which of its
    # threads notices decides whether there is time for a line of our own.
    _, err = both[1 - victim].communicate(timeout=200)
    both[victim].communicate()
    assert both[1 - victim].returncode != 0
    own, jax = "the same commands with the same --workdir resume", "distributed service"
    assert own in err or jax in err
    (_, err), _ = pair([cut, cut], *LONG)
    resumed = int(re.search(r"resuming after interval (\d+) of 60", err).group(1))
    assert 2 <= resumed < 60  # the first chunk is saved, later ones when it is due
    assert metrics(cut) == metrics(whole)


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
