"""Every file in configs/ builds and runs two intervals, offline."""

import dataclasses
import importlib.util
import math
import pathlib
import re

import numpy as np
import pytest

import tsfl_jax
from tsfl_jax import components, config
from tsfl_jax.types import UserError

FOLDER = pathlib.Path(__file__).parents[1] / "configs"
FILES = sorted(
    str(path.relative_to(FOLDER).with_suffix("")) for path in FOLDER.rglob("*.py")
)
SHAPES = {"digits": (8, 8, 1)}
SHAPES |= dict.fromkeys(("mnist", "fashion_mnist", "synthetic"), (28, 28, 1))
SHAPES |= dict.fromkeys(("cifar10", "svhn_cropped"), (32, 32, 3))


def load(name, *arguments) -> tuple[config.Config, str]:
    spec = importlib.util.spec_from_file_location("config", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_config(*arguments), module.__doc__


@pytest.mark.parametrize("name", FILES)
def test_header_says_what_how_long_and_the_command(name):
    _, doc = load(name)
    assert re.search(r"^Reproduces: .+", doc, re.M)
    assert re.search(r"^Time: .*\d", doc, re.M)
    assert re.search(r"^(Expected|Paper, best test accuracy).*: .+", doc, re.M)
    default = name == "digits_case3"
    assert f"--config=configs/{name}.py" in doc or (default and "launch.py" in doc)


def test_experiments_of_the_paper_by_name():
    for name in FILES:
        if re.search("case|select", name) and not name.startswith("digits"):
            assert load(name)[0] == load("papers", name)[0]
    with pytest.raises(UserError, match="did you mean 'mnist_case"):
        load("papers", "mnist_case4")


FRAMEWORKS = [n for n in FILES if n.startswith("frameworks/")]


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_frameworks_can_be_explained_on_the_digits(name):
    """The same clients on data that need no download, with a network that fits."""
    chosen, doc = load(name, "digits")
    assert chosen.data.name == "digits"
    assert chosen.timeline == load(name)[0].timeline
    known = tsfl_jax.explain(chosen)
    assert len(known.trace.time) >= 10 and known.prepared.dataset.name == "digits"
    assert f"--config={name}:digits" in doc


# The fast suite has every network in test_models, every framework in test_replay.
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] * (n != "digits_case3")) for n in FILES],
)
def test_runs_two_intervals_on_synthetic_data_of_its_shape(name, tmp_path):
    chosen, _ = load(name)
    whole = (chosen.num_intervals, chosen.num_clients, chosen.batch_size)
    assert min(whole) >= 4
    # Shapes and networks are the real ones; fewer and smaller clients save time.
    chosen.num_intervals, chosen.num_clients, chosen.batch_size = 2, 4, 4
    data = "synthetic"
    if chosen.data.name == "shakespeare":
        data = "shakespeare"
        roles = "\n\n".join(f"{name}.\nAy" for name in 2 * ["A", "B", "C", "D"])
        (tmp_path / "play.txt").write_text(roles)
        chosen.data.dir, chosen.data.test_size, chosen.cohort.size = str(tmp_path), 0, 2
    elif chosen.data.name != "quadratic":  # is synthetic itself
        chosen.data.shape = SHAPES[chosen.data.name]
        chosen.data.name = "synthetic"
        chosen.data.train_size, chosen.data.test_size = 64, 16
    if chosen.partition.kind != "client":
        chosen.schedule.data_size = 8
    chosen.report_every, chosen.devices = 2, 2
    if chosen.timeline.framework not in ("none", "tsfl"):
        chosen.timeline.local_iterations = 1
    if chosen.timeline.framework == "fedbuff":
        chosen.timeline.buffer = 2
    result = tsfl_jax.simulate(chosen)
    assert data in result.summary["data"]
    loss = result.history["test_loss"]
    # On a timeline the model is tested by the clock, not at every update.
    tested = loss if chosen.timeline.framework == "none" else loss[-1:]
    assert np.isfinite(tested).all()
    assert result.summary["num_discarded"] == 0
    assert result.summary["samples_trained"] > 0


def test_paper_settings():
    for name, lr, intervals, model in [
        ("mnist_case1", 0.003, 50, "mnist_cnn"),
        ("fashion_mnist_case2", 0.003, 100, "fashion_cnn"),
        ("cifar10_case3", 0.005, 50, "vgg11"),
        ("svhn_case3", 0.005, 100, "resnet18"),
    ]:
        c, _ = load(name)
        assert (c.lr, c.num_intervals, c.model.name) == (lr, intervals, model)
        assert (c.num_clients, c.batch_size, c.schedule.data_size) == (20, 32, 1024)
        assert c.schedule.kind == name[-5:]


def test_every_setting_is_declared_with_its_help_and_a_fitting_default():
    """Metadata of the field, which `components.check` reads by the setting's name."""
    assert set(config.SETTINGS) == set(config.flat(dataclasses.asdict(config.Config())))
    for name, (kind, known) in config.SETTINGS.items():
        assert 0 < len(known.help) < 80 and "\n" not in known.help, name
        assert isinstance(config.get(config.Config(), name), kind)
        components.check(config.SETTINGS, name, config.get(config.Config(), name))
        numeric = kind in (int, float, tuple)
        assert numeric or known[2:6] == 2 * (-math.inf, math.inf), name
        assert kind is str or not known.choices, name


@pytest.mark.parametrize(
    ("name", "good", "bad", "words"),
    [
        ("timeline.framework", ["safa"], ["sofa"], "did you mean 'safa'"),
        ("lr", [1e-9, 5], [0, math.nan, 1e39, 1e-50], "a finite float32 number > 0"),
        ("timeline.lag", [0, 7.0], [-1, 1.5, math.inf], "a whole number ≥ 0"),
        ("data.shape", [(8, 8)], [(2**31,)], "a whole number ≤ 2,147,483,647"),
    ],
)
def test_a_value_is_checked_by_the_name_of_its_setting(name, good, bad, words):
    for value in good:
        components.check(config.SETTINGS, name, value)
    for value in bad:
        with pytest.raises(UserError, match=f"^--config.{name}=.*: .*{words}"):
            components.check(config.SETTINGS, name, value)
    # The largest value may depend on another setting.
    components.check(config.SETTINGS, "timeline.buffer", 5, 5, "num_clients")
    with pytest.raises(UserError, match="≤ 5 = --config.num_clients"):
        components.check(config.SETTINGS, "timeline.buffer", 6, 5, "num_clients")
