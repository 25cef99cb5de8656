"""Runs killed at random moments end with the same files as one that was left alone."""

import os
import pathlib
import signal
import subprocess
import sys

import numpy as np
import pytest

from tests.problems import files, same

ROOT = pathlib.Path(__file__).parents[2]

# Kills itself at the N-th thing that it does to files below the workdir: open, rename,
# remove, mkdir. N = 0: never; it then prints how many there were.
RUN = """
import os, signal, sys
workdir, last = sys.argv[1], int(sys.argv[2])
count = 0

def hook(received, arguments):
    global count
    if received not in ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir"):
        return
    if workdir in str(arguments[0]):
        count += 1
        if count == last:
            os.kill(os.getpid(), signal.SIGKILL)

from tests.problems import small
import tsfl_jax
print("ready", flush=True)
sys.addaudithook(hook)
tsfl_jax.simulate(small(), workdir=workdir)
print(count)
"""


def start(workdir, last=0):
    command = [sys.executable, "-c", RUN, str(workdir), str(last)]
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(workdir):
    """Runs to the end; how many events there were."""
    out, err = start(workdir).communicate(timeout=300)
    assert "ready" in out and out.split()[-1].isdecimal(), err
    return int(out.split()[-1])


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run without a kill: folder, events."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    return folder, finish(folder)


# Two kills of one run each, drawn anew for each number.
@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="needs SIGKILL")
@pytest.mark.parametrize("number", range(6))
def test_killed(whole, tmp_path, number):
    folder, events = whole
    for last in np.random.default_rng([20, number]).integers(1, events + 1, 2):
        process = start(tmp_path / "run", last)
        process.communicate(timeout=300)
        # A resumed run has less to do and may end before its moment.
        assert process.returncode in (-signal.SIGKILL, 0)
    finish(tmp_path / "run")
    same(files(tmp_path / "run"), files(folder))
    names = [{p.name for p in f.iterdir()} for f in (tmp_path / "run", folder)]
    assert all(name.startswith(".") for name in names[0] ^ names[1])
