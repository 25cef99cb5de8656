"""Ctrl-C while a command starts."""

import os
import signal
import subprocess
import sys
import time

import pytest

import tsfl_jax
from tests.launches import ROOT, environment
from tests.problems import small
from tsfl_jax import cli, command, interrupts

TRAIN = ["--config.num_intervals=5000"]
COMMANDS = {
    "launch.py": ["launch.py", *TRAIN],
    "tsfl": [
        "-c",
        "import sys; sys.argv = ['tsfl', 'run', *sys.argv[1:]]\n"
        "from tsfl_jax.__main__ import main; main()",
        *TRAIN,
    ],
    "-m tsfl_jax": ["-m", "tsfl_jax", "run", *TRAIN],
    "-m studies.compare": ["-m", "studies.compare", "frameworks:digits"],
    "-m studies": ["-m", "studies.bounds"],
}


def stopped(name, seconds, folder):
    """Exit code and lines of a command that gets SIGINT so long after its first line.

    From the package's first line on: before it Python ends as it likes, and on a busy
    machine that takes long. Python's list of imports tells when it is reached.
    """
    out = f"--{'workdir' if COMMANDS[name][-1:] == TRAIN else 'out'}={folder / 'run'}"
    words = [sys.executable, "-X", "importtime", *COMMANDS[name], out]
    path, deadline = folder / f"errors-{seconds}", time.time() + 60
    options = {"cwd": ROOT, "env": environment()}
    with path.open("w") as file, subprocess.Popen(words, stderr=file, **options) as run:
        while "tsfl_jax.interrupts" not in path.read_text() and time.time() < deadline:
            time.sleep(0.01)
        time.sleep(seconds)
        run.send_signal(signal.SIGINT)
        code = run.wait(timeout=60)
    lines = path.read_text().splitlines()
    return code, [line for line in lines if not line.startswith("import time:")]


@pytest.mark.parametrize(
    ("name", "seconds"),
    [
        ("launch.py", 0.01),
        ("tsfl", 0.5),
        ("-m tsfl_jax", 0.01),
        ("-m tsfl_jax", 0.4),
        ("-m studies", 0.3),
    ],
)
def test_an_early_stop_is_one_line(name, seconds, tmp_path):
    code, lines = stopped(name, seconds, tmp_path)
    assert (code, lines[-1:]) == (130, ["stopped"])
    assert len(lines) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_a_stop_at_any_moment_of_the_start_is_one_line(name, tmp_path):
    for step in range(10):
        code, lines = stopped(name, 0.4 * step, tmp_path)
        assert code == 130, (step, lines)
        assert "stopped" in lines[-1], (step, lines)
        while_importing = lines[-1] == "stopped"
        assert not while_importing or len(lines) == 1, (step, lines)
        assert "Traceback" not in str(lines), (step, lines)


def test_the_request_to_end_saves_as_ctrl_c(tmp_path):
    given = [sys.executable, *COMMANDS["launch.py"], f"--workdir={tmp_path}"]
    given += ["--config.report_every=5"]
    with subprocess.Popen(given, cwd=ROOT, stderr=subprocess.PIPE, text=True) as run:
        deadline = time.time() + 60
        while not (tmp_path / "metrics.jsonl").exists() and time.time() < deadline:
            time.sleep(0.1)
        run.send_signal(signal.SIGTERM)
        _, errors = run.communicate(timeout=60)
    assert run.returncode == 130
    assert f"--workdir={tmp_path} resumes" in errors.splitlines()[-1]
    assert any((tmp_path / "checkpoints").iterdir())


def test_programs_that_import_the_package_get_ctrl_c_as_usual(tmp_path):
    """Also one that is called launch.py, or whose package imports ours."""
    words = "import signal, tsfl_jax\n"
    words += "print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)\n"
    (tmp_path / "launch.py").write_text(words)
    (tmp_path / "studies").mkdir()
    (tmp_path / "studies" / "__init__.py").write_text(words)
    (tmp_path / "studies" / "one.py").write_text("")
    for given in (["launch.py"], ["-m", "studies.one"]):
        called = [sys.executable, *given]
        done = subprocess.run(
            called, cwd=tmp_path, env=environment(), capture_output=True, text=True
        )
        assert done.stdout == "True\n", done.stderr


def test_an_interrupt_that_python_has_ignored_is_not_lost(monkeypatch):
    monkeypatch.setattr(interrupts, "_signals", [])
    with pytest.raises(KeyboardInterrupt):
        interrupts._raise(signal.SIGINT, None)  # as in a callback, which drops it
    with pytest.raises(KeyboardInterrupt):
        cli._interrupts()


@pytest.mark.parametrize("call", [tsfl_jax.simulate, tsfl_jax.sweep])
def test_an_interrupt_that_a_callback_dropped_ends_a_study_after_its_call(
    call, monkeypatch
):
    monkeypatch.setattr(interrupts, "_signals", [signal.SIGINT])
    swept = [{"seed": [0]}] if call is tsfl_jax.sweep else []
    with pytest.raises(KeyboardInterrupt):
        call(small(), *swept)


@pytest.mark.parametrize("error", [None, ImportError])
def test_a_command_whose_ctrl_c_a_library_dropped_ends_as_stopped(
    error, monkeypatch, capsys
):
    def main(texts):
        del texts
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
        except BaseException as lost:
            if error is not None:
                raise error("numpy") from lost

    monkeypatch.setattr(interrupts, "_signals", [])
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    before = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit) as ended:
            command.run("tsfl run", main, [])
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended.value.code == 130
    assert capsys.readouterr().err.splitlines() == [
        "tsfl run: stopped; the same command reuses what is finished"
    ]


STOPS_IN_EXEC = """
import os, signal, time
from tsfl_jax import command
text = "os.kill(os.getpid(), signal.SIGINT); time.sleep(1)"
command.run("tsfl run", lambda texts: exec(text), [])
"""


def test_a_stop_in_an_exec_has_the_exit_code_too(tmp_path):
    """As in the imports of namedtuples: Python ends by the signal, with -m only."""
    (tmp_path / "stops.py").write_text(STOPS_IN_EXEC)
    called, env = [sys.executable, "-m", "stops"], environment()
    done = subprocess.run(called, cwd=tmp_path, env=env, stderr=subprocess.PIPE)
    assert done.returncode == 130
    assert len(done.stderr.splitlines()) == 1
