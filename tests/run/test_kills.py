"""Runs killed at random moments end with the same files as one that was left alone."""

import os
import pathlib
import signal
import subprocess
import sys
import time

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
    """Runs to the end; how many events there were, seconds."""
    process, begun = start(workdir), 0.0
    assert process.stdout.readline() == "ready\n"
    begun = time.monotonic()
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return int(out), time.monotonic() - begun


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run without a kill: folder, events, seconds."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    finish(folder)  # fills the compilation cache
    folder = folder.with_name("again")
    return folder, *finish(folder)


def check(folder, whole):
    """The next run of a killed one ends as if nothing had happened."""
    finish(folder)
    same(files(folder), files(whole[0]))
    names = [{p.name for p in f.iterdir()} for f in (folder, whole[0])]
    left = {name for name in names[0] - names[1] if not name.startswith(".")}
    assert not left and names[1] <= names[0]


# Two kills of one run each, drawn anew for each number.
@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="needs SIGKILL")
@pytest.mark.parametrize("where", ["at a file", "at a time"])
@pytest.mark.parametrize("number", range(5))
def test_killed(whole, tmp_path, where, number):
    _, events, seconds = whole
    rng = np.random.default_rng([20, number])
    for _ in range(2):
        last = rng.integers(1, events + 1) if where == "at a file" else 0
        process = start(tmp_path / "run", last)
        if where == "at a time":
            assert process.stdout.readline() == "ready\n"
            time.sleep(rng.uniform(0, seconds))
            process.send_signal(signal.SIGKILL)
        process.communicate(timeout=300)
        # A resumed run has less to do and may end before its moment.
        assert process.returncode in (-signal.SIGKILL, 0)
    check(tmp_path / "run", whole)
