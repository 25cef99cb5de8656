"""The wheel is the whole product: its command runs outside of a checkout."""

import json
import os
import pathlib
import runpy
import subprocess
import sys
import tomllib

import pytest

import tsfl_jax
from tsfl_jax import __main__ as tsfl
from tsfl_jax import config_files
from tsfl_jax.config import SETTINGS
from tsfl_jax.types import UserError

ROOT = pathlib.Path(__file__).parents[1]


def install_wheel(folder):
    """An environment with the wheel and what it requires, all outside the checkout."""
    # A copy: building writes into the folder.
    copy = "git ls-files -z | xargs -0 cp --parents -t"
    (folder / "source").mkdir()
    subprocess.run(f"{copy} {folder / 'source'}", shell=True, check=True, cwd=ROOT)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    wheel = [*pip, "wheel", "--no-deps", "-w", str(folder), str(folder / "source")]
    done = subprocess.run(wheel, capture_output=True, text=True)
    if "Could not find a version that satisfies the requirement" in done.stderr:
        pytest.skip("no package index")
    assert done.returncode == 0, done.stderr
    (file,) = folder.glob("tsfl_jax-*.whl")
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    python = folder / "venv" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", file], check=True)
    return python.parent


@pytest.mark.slow
def test_the_wheel_runs_outside_of_the_checkout(tmp_path):
    """All but preparing TFDS data, which names the extra; without TensorFlow."""
    programs = install_wheel(tmp_path)
    site = next((programs.parent / "lib").glob("python*/site-packages"))
    assert (site / "tsfl_jax" / "py.typed").exists()
    assert not (site / "tensorflow").exists() and not (site / "array_record").exists()

    def tsfl(*words):
        hidden = ("PYTHONPATH", "TFDS_DATA_DIR")
        return subprocess.run(
            [programs / "tsfl", *words],
            cwd=tmp_path,
            env={k: v for k, v in os.environ.items() if k not in hidden},
            capture_output=True,
            text=True,
        )

    done = tsfl("run", "--workdir=main")
    assert done.returncode == 0, done.stderr
    accuracy = json.loads((tmp_path / "main" / "summary.json").read_text())
    assert accuracy["best_test_accuracy"] > 0.9
    assert (tmp_path / "main" / "curves.png").exists()
    done = tsfl("run", "--config=smoke")
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("smoke-") and (folder / "summary.json").exists()
    done = tsfl("run", "--config=mnist_case1", f"--config.data.dir={tmp_path}/none")
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert "no mnist in" in last and "pip install 'tsfl_jax[tfds]'" in last


def test_the_oldest_versions_are_those_of_pyproject():
    """The constraints that CI installs: a lower bound for each dependency, pinned."""
    pins = runpy.run_path(str(ROOT / ".ci" / "oldest.py"))["constraints"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = [text.split(",")[0] for text in project["project"]["dependencies"]]
    assert pins(project) == [text.replace(">=", "==") for text in wanted]
    assert "jax==0.10" in pins(project)
    with pytest.raises(SystemExit, match="numpy: has no lower bound"):
        pins({"project": {"dependencies": ["numpy"]}})


def test_experiments_are_known_by_name():
    folder = config_files.FOLDER
    assert config_files.find("mnist_case1") == str(folder / "mnist_case1.py")
    assert config_files.find("afl") == str(folder / "frameworks" / "afl.py")
    afl = folder / "frameworks" / "afl.py"
    assert config_files.find("frameworks/afl.py:digits") == f"{afl}:digits"
    assert config_files.split("C:\\\\afl.py") == ("C:\\\\afl.py", "")
    with pytest.raises(UserError, match="did you mean 'mnist_case1'"):
        config_files.find("mnist_csae1")
    assert config_files.descriptions()["smoke"].startswith("A few seconds")


def test_a_pipe_that_closes_early_ends_without_a_traceback():
    command, pipe = [sys.executable, "-m", "tsfl_jax", "settings"], subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, cwd=ROOT) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 1


def test_the_version_and_the_commands_are_shown(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["tsfl", "--version"])
    tsfl.main()
    assert capsys.readouterr().out == f"tsfl_jax {tsfl_jax.__version__}\n"
    monkeypatch.setattr(sys, "argv", ["tsfl"])
    tsfl.main()
    lines = capsys.readouterr().out.splitlines()
    listed = {line.split()[0] for line in lines if line.startswith("  ")}
    assert listed == {"run", "sweep", "explain", "report", "configs", "settings"}


def test_settings_are_listed_by_group(capsys):
    tsfl.list_settings(["dms"])
    lines = capsys.readouterr().out.splitlines()
    names = [line for line in lines if line.startswith("--config.dms.")]
    wanted = [n for n in SETTINGS if n.startswith("dms.")]
    assert [n.split("=")[0] for n in names] == [f"--config.{n}" for n in wanted]
    assert max(map(len, lines)) <= 99


def test_the_page_of_settings_is_up_to_date():
    program = ROOT / "docs" / "settings_page.py"
    page = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    assert runpy.run_path(str(program))["markdown"]() == page, f"python {program}"


@pytest.mark.parametrize("word", ["run", "report"])
def test_words_show_their_help(capsys, monkeypatch, word):
    monkeypatch.setattr(sys, "argv", ["tsfl", word, "--help"])
    with pytest.raises(SystemExit) as ended:
        tsfl.main()
    out = capsys.readouterr().out
    assert ended.value.code == 0 and out.startswith(f"usage: tsfl {word}")
