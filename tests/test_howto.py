"""The pages of docs/howto: Python blocks run, command lines have flags that exist."""

import contextlib
import io
import pathlib
import re
import runpy
import shlex
import sys

import pytest

import tsfl_jax
from tests import examples
from tsfl_jax import cli
from tsfl_jax.config import SETTINGS
from tsfl_jax.run import grid

PAGES = sorted(path.name for path in (examples.DOCS / "howto").glob("*.md"))
# Python blocks that cannot run here, by page and place: why.
SKIPPED = {("devices.md", 0): "needs a running Flower server"}
# Programs of others, which nothing here can check.
FOREIGN = {"pip", "tensorboard", "flower-superlink", "flower-supernode"}


def blocks(page, *languages):
    """The blocks of a page in some languages, "": of a terminal."""
    found = re.findall(
        r"^```(\w*)\n(.*?)^```", examples.text(f"howto/{page}"), re.M | re.S
    )
    return [block for language, block in found if language in languages]


# Train twelve runs and more.
SLOW = {(f"{name}.md", 0) for name in ("tune", "compression", "privacy", "attacks")}
# Fast, too: test_extending and test_writers.
SLOW |= {("extend.md", 1), ("extend.md", 2), ("follow.md", 0)}


def marks(page, number):
    """Why a Python block is left out, or left to the slow tests."""
    if reason := SKIPPED.get((page, number)):
        return [pytest.mark.skip(reason=reason)]
    return [pytest.mark.slow] if (page, number) in SLOW else []


PYTHON = [
    pytest.param(page, block, id=f"{page}-{number}", marks=marks(page, number))
    for page in PAGES
    for number, block in enumerate(blocks(page, "python"))
]
COMMANDS = [
    pytest.param(line, id=f"{page}-{line[:60]}")
    for page in PAGES
    for block in blocks(page, "", "bash")
    for line in block.replace("\\\n", " ").splitlines()
    if shlex.split(line, comments=True) and not line.startswith("python -c")
]


def check_follow(variables, out):
    """The function saw three intervals, and so did the other writer."""
    history = variables["result"].history["test_accuracy"]
    printed = [line.split() for line in out.splitlines()]
    assert [number for number, *_ in printed] == ["1", "2", "3"]
    assert [float(accuracy) for *_, accuracy in printed] == pytest.approx(history)
    rows = pathlib.Path("runs/own/metrics.csv").read_text().splitlines()
    assert len(rows) == 1 + 3


def check_tune(variables, out):
    """The best of the twelve runs is printed."""
    study = variables["study"]
    assert len(study.trials) == 12 and 0 < study.best_value <= 1
    assert str(study.best_value) in out


def check_compression(variables, out):
    """The table of the page: the same bytes, about the same accuracy."""
    del variables
    tables = [
        [re.findall(r"([\d.]+) (?:MB|%)", line) for line in text.splitlines()]
        for text in (out, blocks("compression.md", "text")[0])
    ]
    for printed, expected in zip(*tables, strict=True):
        assert printed[-2] == expected[-2]
        assert float(printed[-1]) == pytest.approx(float(expected[-1]), abs=3)


def check_costs(variables, out):
    """The page has the numbers of the two plans."""
    whole, topk = (line for line in out.splitlines())
    assert whole.startswith("[4 4 4 4]") and topk.startswith("[7 7 7 7]")
    totals = variables["plan"].costs.totals
    assert totals["bytes_up"] == 7686 and round(totals["energy_joules"]) == 458
    assert "'bytes_up': 58560, 'energy_joules': 312.0" in whole
    assert all(n in examples.text("howto/costs.md") for n in ("58,560", "7,686", "458"))


def check_privacy(variables, out):
    """The numbers of the page's table, and ε as the library has it."""
    text = examples.text("howto/privacy.md")
    *rows, epsilon = out.splitlines()
    accuracies = [line.split(": ")[1] for line in rows]
    assert f"| final accuracy | {' | '.join(accuracies)} |" in text
    assert [line.split(":")[0] for line in rows] == ["inf", "8", "3", "1"]
    explained = tsfl_jax.explain(variables["config"]).prepared.privacy
    assert explained.epsilon[-1] == pytest.approx(float(epsilon), rel=1e-6)
    assert pathlib.Path("privacy.png").stat().st_size > 10_000


def check_attacks(variables, out):
    """The median survives what the mean does not."""
    (honest, attacked), robust = variables["accuracy"].values()
    assert robust[1] > attacked + 0.3 and honest > attacked + 0.3
    assert out.startswith("fedavg [")


def check_extend(variables, out):
    """Numbers of each block, and that the user's own parts were in it."""
    if "pairs" in variables:
        assert 0 < float(out) <= 1
    elif "Power" in variables:
        assert out == "[0.5, 0.5, 1.0, 1.0]\n"
    elif "chain" in variables:
        (_, whole, _), (_, part, _) = (line.split() for line in out.splitlines())
        assert int(part) < 0.25 * int(whole)
    else:
        assert variables["result"].summary["algorithm"] == "custom"


def components_of(page):
    """The file of a page's command lines: what is registered there."""
    block = next(b for b in blocks(page, "python") if "register(" in b)
    return block[: block.index("config =")]


CHECKS = {
    "extend.md": check_extend,
    "follow.md": check_follow,
    "tune.md": check_tune,
    "compression.md": check_compression,
    "costs.md": check_costs,
    "privacy.md": check_privacy,
    "attacks.md": check_attacks,
}


@pytest.mark.parametrize(("page", "block"), PYTHON)
def test_python_blocks_run(page, block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in re.findall(r"^import (\w+)$", block, re.M):
        pytest.importorskip(name)
    CHECKS[page](*examples.run(block))


def refused(command):
    """What a command says of an additional flag: all that it does not know."""
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), pytest.raises(SystemExit):
        command()
    return errors.getvalue()


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("line", COMMANDS)
def test_flags_of_command_lines_exist(line, monkeypatch, tmp_path):
    if "--components=mine.py" in line:
        monkeypatch.chdir(tmp_path)
        pathlib.Path("mine.py").write_text(components_of("extend.md"))
        monkeypatch.delitem(sys.modules, "mine", raising=False)
    line = re.sub(r"\$\w+", "1", line)
    line = re.sub(r"(--idx|--data_dir) \w+", r"\1 .", line)  # folders that exist
    words = shlex.split(line, comments=True)
    words = words[1:] if words[0] in ("srun", "time") else words
    program, name, *texts = words
    if program in FOREIGN:
        pytest.skip(f"{program}: a program of others")
    if program == "tsfl" and name in ("run", "sweep", "explain"):
        given, config = cli.parse(f"tsfl {name}", texts)
        for values in grid.points(grid.parse(given.sweep)) if given.sweep else []:
            grid.changed(config, values)
        return
    if program == "tsfl":
        module, texts = "tsfl_jax", [name, *texts]
    else:
        assert (program, name) == ("python", "-m")
        module, *texts = texts
    monkeypatch.setattr(sys, "argv", [module, *texts, "--no-such-flag"])
    said = refused(lambda: runpy.run_module(module, run_name="__main__"))
    assert re.search("unrecognized arguments: --no-such-flag(;|\n)", said), said


def test_epsilon_of_the_tutorial_is_reproduced():
    """TensorFlow Federated's is 2."""
    pytest.importorskip("dp_accounting")
    line = next(b for b in blocks("privacy.md", "") if "3383" in b)
    words = shlex.split(line.replace("\\\n", " "))
    _, config = cli.parse("tsfl explain", words[2:])
    text = " ".join(repr(tsfl_jax.explain(config)).split())
    assert "ε = 1.986, δ = 1e-05; z = 1.2; 100 secret cohorts drawn by poisson" in text
    assert "| ε at δ = 10⁻⁵ | 2 | 1.986 |" in examples.text("howto/privacy.md")


@pytest.mark.parametrize("page", PAGES)
def test_settings_that_a_page_names_exist(page):
    text = examples.text(f"howto/{page}")
    if "--components=mine.py" in text:
        exec(components_of(page), {})
    for name in re.findall(r"--config\.([a-z_]+(?:\.[a-z_]+)*)", text):
        assert name in SETTINGS or any(n.startswith(f"{name}.") for n in SETTINGS), name


def test_every_setting_that_a_message_names_exists():
    """A name before what is filled in is a section."""
    known = {*SETTINGS, *(name.partition(".")[0] for name in SETTINGS), "NAME"}
    for path in examples.DOCS.parent.glob("tsfl_jax/**/*.py"):
        for name in re.findall(r"--config\.(\w[\w.]*)", path.read_text("utf-8")):
            assert name.strip(".") in known, (path, name)


def test_points_of_a_sweep_are_read(tmp_path):
    texts = [b for b in blocks("sweep.md", "yaml") if b.startswith("- {")]
    command = next(b for b in blocks("sweep.md", "") if b.startswith("python -c"))
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(shlex.split(command)[2], {})
    for text in (*texts, out.getvalue()):
        (tmp_path / "sweep.yaml").write_text(text)
        assert len(grid.read_points(str(tmp_path / "sweep.yaml"))) in (2, 10)
