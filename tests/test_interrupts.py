"""Ctrl-C while a command starts."""

import signal
import subprocess
import sys
import time

import pytest

from tests.launches import ROOT
from tsfl_jax import cli, interrupts

COMMANDS = {
    "launch.py": ["launch.py"],
    "tsfl": [
        "-c",
        "import sys; sys.argv = ['tsfl', 'run', *sys.argv[1:]]\n"
        "from tsfl_jax.__main__ import main; main()",
    ],
}


@pytest.mark.parametrize(
    ("command", "seconds"), [("launch.py", 0.01), ("tsfl", 0.8), ("launch.py", 2)]
)
def test_an_early_stop_is_one_line(command, seconds, tmp_path):
    """The word, exit code 130, no traceback.

    From the package's first line on: before it Python ends as it likes, and on a busy
    machine that takes long. Python's list of imports tells when it is reached.
    """
    given = [sys.executable, "-X", "importtime", *COMMANDS[command]]
    given += [f"--workdir={tmp_path / 'run'}", "--config.num_intervals=5000"]
    path, deadline = tmp_path / "errors", time.time() + 60
    with path.open("w") as file, subprocess.Popen(given, cwd=ROOT, stderr=file) as run:
        while "tsfl_jax.interrupts" not in path.read_text() and time.time() < deadline:
            time.sleep(0.01)
        time.sleep(seconds)
        run.send_signal(signal.SIGINT)
        assert run.wait(timeout=60) == 130
    errors = path.read_text()
    assert "stopped" in errors.splitlines()[-1]
    assert "Traceback" not in errors


def test_the_request_to_end_saves_as_ctrl_c(tmp_path):
    given = [sys.executable, *COMMANDS["launch.py"], f"--workdir={tmp_path}"]
    given += ["--config.num_intervals=5000", "--config.report_every=5"]
    with subprocess.Popen(given, cwd=ROOT, stderr=subprocess.PIPE, text=True) as run:
        deadline = time.time() + 60
        while not (tmp_path / "metrics.jsonl").exists() and time.time() < deadline:
            time.sleep(0.1)
        run.send_signal(signal.SIGTERM)
        _, errors = run.communicate(timeout=60)
    assert run.returncode == 130
    assert f"--workdir={tmp_path} resumes" in errors.splitlines()[-1]
    assert any((tmp_path / "checkpoints").iterdir())


def test_an_interrupt_that_python_has_ignored_is_not_lost(monkeypatch):
    monkeypatch.setattr(interrupts, "_asked", [])
    with pytest.raises(KeyboardInterrupt):
        interrupts._raise(signal.SIGINT, None)  # as in a callback, which drops it
    with pytest.raises(KeyboardInterrupt):
        cli._interrupts()
