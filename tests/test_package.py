"""The wheel is the whole product: its command runs outside of a checkout."""

import os
import pathlib
import subprocess
import sys

import pytest

import tsfl_jax
from tsfl_jax import __main__ as tsfl
from tsfl_jax import config_files
from tsfl_jax.config import SETTINGS
from tsfl_jax.report import settings
from tsfl_jax.types import UserError

ROOT = pathlib.Path(__file__).parents[1]


def call(*words):
    """What ``tsfl`` prints, and its exit code."""
    done = subprocess.run(
        [sys.executable, "-m", "tsfl_jax", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
def test_the_wheel_runs_outside_of_the_checkout(tmp_path):
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    # A copy: building writes into the folder.
    copy = "git ls-files -z | xargs -0 cp --parents -t"
    (tmp_path / "source").mkdir()
    subprocess.run(f"{copy} {tmp_path / 'source'}", shell=True, check=True, cwd=ROOT)
    wheel = [*pip, "wheel", "--no-deps", "-w", str(tmp_path), str(tmp_path / "source")]
    subprocess.run(wheel, check=True)
    (file,) = tmp_path.glob("tsfl_jax-*.whl")
    site = tmp_path / "site"
    subprocess.run([*pip, "install", "--no-deps", f"--target={site}", file], check=True)
    assert (site / "tsfl_jax" / "py.typed").exists()
    environment = os.environ | {"PYTHONPATH": str(site)}
    done = subprocess.run(
        [sys.executable, site / "bin" / "tsfl", "run", "--config=smoke"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("smoke-") and (folder / "summary.json").exists()


def test_version_and_names():
    assert tsfl_jax.__version__.count(".") == 2
    assert "simulate" in dir(tsfl_jax) and "engine" not in dir(tsfl_jax)
    for name in dir(tsfl_jax):
        getattr(tsfl_jax, name)


def test_experiments_are_known_by_name(tmp_path):
    folder = config_files.FOLDER
    assert config_files.find("mnist_case1") == str(folder / "mnist_case1.py")
    assert config_files.find("afl") == str(folder / "frameworks" / "afl.py")
    assert config_files.find("frameworks/afl.py") == config_files.find("afl")
    found = config_files.find("papers.py:svhn_case3")
    assert found == f"{folder / 'papers.py'}:svhn_case3"
    own = tmp_path / "own.py"
    own.write_text("")
    assert config_files.find(str(own)) == str(own)
    with pytest.raises(UserError, match="did you mean 'mnist_case1'"):
        config_files.find("mnist_csae1")
    assert config_files.known()["smoke"].startswith("A few seconds")


def test_words(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["tsfl"])
    tsfl.main()
    lines = capsys.readouterr().out.splitlines()
    listed = {line.split()[0] for line in lines if line.startswith("  ")}
    assert listed == {*tsfl._CLI, *tsfl._MODULES, "configs", "settings"}


@pytest.mark.parametrize(
    "words, message",
    [
        (["rnu"], "tsfl: rnu: there is no such word; did you mean 'run'?"),
        (["settings", "dsm"], "tsfl: settings dsm: there is no such group; did you"),
        (["configs", "x"], "tsfl: configs x: expected no arguments"),
        (["run", "--config=mnist"], "tsfl: --config=mnist: no such file"),
        (["sweep"], "tsfl: sweep: which settings? add --sweep NAME=VALUES"),
    ],
)
def test_wrong_words(words, message):
    code, _, error = call(*words)
    assert code == 2 and message in error


def test_settings_are_listed_by_group(capsys):
    tsfl.list_settings(["dms"])
    lines = capsys.readouterr().out.splitlines()
    names = [line for line in lines if line.startswith("--config.dms.")]
    assert len(names) == 13 and lines[0].startswith("--config.dms.constants=")
    assert max(map(len, lines)) <= 99
    tsfl.list_settings(["lr"])
    assert capsys.readouterr().out.startswith("--config.lr=")
    tsfl.list_settings([])
    lines = capsys.readouterr().out.splitlines()
    shown = [line.split("=")[0] for line in lines if line.startswith("--config.")]
    assert shown == [f"--config.{name}" for name in SETTINGS]


def test_the_page_of_settings_is_up_to_date(capsys):
    tsfl.list_settings(["--markdown"])
    page = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    remake = "tsfl settings --markdown > docs/settings.md"
    assert capsys.readouterr().out == page, remake
    assert all(f"| `{name}` |" in page for name in SETTINGS)


def test_help_shows_flags_and_common_settings():
    code, out, error = call("run", "--help")
    assert code == 0 and not error
    for name in settings.COMMON:
        assert f"--config.{name}=" in out
    assert "--config.algorithm='dms'" in out and ", krum" in out
    assert "--config.partition.kind='dirichlet'" in out and "iid, dirichlet" in out
    for flag in ("--sweep=", "--sweep_file=", "--explain=", "--workdir="):
        assert f"  {flag}" in out
    assert f"All {len(SETTINGS)} settings: tsfl settings" in out
    assert max(map(len, out.splitlines())) <= 100
