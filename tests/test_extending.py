"""The worked examples of docs/architecture.md run, each as it stands."""

import functools
import linecache
import os
import pathlib
import re
import runpy
import shutil
import signal
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import tsfl_jax
from tests import examples
from tsfl_jax import __main__, registry
from tsfl_jax.components import Part
from tsfl_jax.config import replace
from tsfl_jax.prepare import prepare
from tsfl_jax.rules.base import weights_of
from tsfl_jax.uplink import UPLINKS

TEXT = examples.text("architecture.md")
EXAMPLES = examples.examples("architecture.md", r"^### … an? (.+?)\n(.*?)(?=^##)")


def run(title: str) -> tuple[dict, str]:
    """Variables and output of an example."""
    return examples.run(EXAMPLES[title])


def test_each_kind_of_extension_has_an_example():
    kinds = {"aggregation rule", "data set", "network", "framework", "study"}
    assert set(EXAMPLES) == kinds


@pytest.mark.parametrize("title", EXAMPLES)
def test_an_extension_touches_at_most_two_files_that_exist(title):
    section = TEXT.split(f" {title}\n")[1].split("```")[0]
    files = re.findall(r"`([\w/]+\.py)`", section.split(". ")[0])
    root = pathlib.Path(__file__).parents[1]
    there = [(root / "tsfl_jax" / n).exists() or (root / n).exists() for n in files]
    assert len(files) <= 2 and all(there)


def test_a_rule():
    variables, _ = run("aggregation rule")
    history = variables["result"].history
    np.testing.assert_allclose(history["rho"].sum(axis=1), 1, rtol=1e-6)
    rho = tsfl_jax.weights(variables["rule"], tau=[1, 0, 2], size=[1, 1, 9])
    np.testing.assert_allclose(rho, [1 / 4, 0, 3 / 4], rtol=1e-6)


@pytest.mark.slow
def test_a_data_set():
    assert run("data set")[1] == "True\n"


@pytest.mark.slow
def test_a_network():
    assert run("network")[1] == "(64, 16)\n"


def test_a_framework():
    variables, _ = run("framework")
    schedule, simulation = variables["schedule"], variables["simulation"]
    assert ((schedule.tau > 0).sum(axis=1) == 2).all() and len(schedule.tau) > 5
    assert schedule.tau[0].tolist() == [0, 2, 2, 0]  # 0.2 and 0.4 s per iteration
    assert schedule.seconds[:3].tolist() == [0.8, 1.6, 2.4]
    assert len(simulation.tasks) == 4 * len(schedule.tau)


@pytest.mark.slow
def test_a_study():
    lines = run("study")[1].splitlines()
    assert [line.split(":")[0] for line in lines] == ["alpha 0.1", "alpha 10.0"]


NEW_RULE = '''
"""A rule of a newcomer."""

import jax.numpy as jnp

from tsfl_jax.components import component, setting
from tsfl_jax.rules.base import Aggregator, Mixing, normalized, weights_of


@component("root")
class Root:
    """Weights by a power of the samples."""

    power: float = setting(0.5, "p in ρ_i ∝ |D_i|^p", low=0, high=1)


def weights(info, hparams):
    share = jnp.float32(info.size) ** hparams.of(Root).power
    return weights_of(normalized(share, info.tau), info.tau)


ROOT = Aggregator(Mixing(weights), sections=(Root,))
'''


def printed(folder: pathlib.Path, *words: str) -> str:
    """What a Python program prints."""
    path = os.pathsep.join([str(folder), *sys.path])
    found = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stderr
    return found.stdout


def copy_with(folder: pathlib.Path) -> None:
    """A copy of the package with the parts: a file and a line each."""
    there, package = pathlib.Path(tsfl_jax.__file__).parent, folder / "tsfl_jax"
    shutil.copytree(there, package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(there.parent / "configs", folder / "configs")
    for by, (file, written, name, row) in PARTS.items():
        table, opening = TABLES[by]
        (package / file).write_text(written.lstrip())
        module = "tsfl_jax." + file.removesuffix(".py").replace("/", ".")
        text = (package / table).read_text()
        assert text.count(f"{opening}\n") == 1
        lines = f'from {module} import *\n\n{opening}\n    "{name}": {row},\n'
        (package / table).write_text(text.replace(f"{opening}\n", lines))


def file_with(folder: pathlib.Path) -> None:
    """The parts in a file of a user's own."""
    calls = [f"register({by!r}, {n!r}, {row})" for by, (*_, n, row) in PARTS.items()]
    head = "from tsfl_jax import register\nfrom tsfl_jax.components import Part\n"
    head += "from tsfl_jax.timeline import FleetConfig, Framework\n"
    texts = (written for _, written, *_ in PARTS.values())
    (folder / "mine.py").write_text("\n".join([head, *texts, *calls]))


SOURCE = """
import numpy as np

from tsfl_jax.components import component, setting
from tsfl_jax.data import in_memory


@component("data")
class Blobs:
    spread: float = setting(1.0, "blobs: σ within a class", above=0)


def blobs(settings, seed):
    y = np.arange(400) % 3
    noise = np.random.default_rng(seed).normal(size=(400, 4))
    x = 5 * y[:, None] + settings.spread * noise
    return in_memory.make_dataset(x[:360], y[:360], x[360:], y[360:], name="blobs")
"""
PARTITION = """
import numpy as np

from tsfl_jax.components import component, setting


@component("partition")
class Skewed:
    share: float = setting(0.5, "skewed: share of the first class", low=0, high=1)


def skewed(settings, capacity, stock, rng):
    rest = (1 - settings.share) / (len(stock) - 1)
    row = [settings.share, *[rest] * (len(stock) - 1)]
    return np.tile(row, (len(capacity), 1))
"""
NETWORK = """
from flax import linen as nn

from tsfl_jax.components import component, setting


@component("model")
class LinearConfig:
    bias: bool = setting(True, "linear: whether it has one", static=True)


class Linear(nn.Module):
    num_classes: int
    bias: bool

    @nn.compact
    def __call__(self, x):
        flat = x.reshape(x.shape[0], -1)
        return nn.Dense(self.num_classes, use_bias=self.bias)(flat)
"""
FRAMEWORK = """
from tsfl_jax.components import component, setting
from tsfl_jax.timeline import asynchronous


@component("timeline")
class Pairs:
    quota: int = setting(2, "pairs: deliveries per update", low=1)


def pairs(fleet, *, horizon, iterations, quota):
    given = {"horizon": horizon, "iterations": iterations}
    return asynchronous.fedbuff(fleet, **given, buffer=quota)
"""
LINK = """
import jax
import jax.numpy as jnp

from tsfl_jax.components import component, setting
from tsfl_jax.uplink.link import Uplink


@component("held_back")
class HeldBack:
    part: float = setting(0.5, "part of an update that is sent later", low=0, below=1)


def init(params, settings):
    return jax.tree.map(jnp.zeros_like, params["params"])


def send(update, waiting, task, settings):
    total = jax.tree.map(jnp.add, update["params"], waiting)
    waiting = jax.tree.map(lambda u: settings.part * u, total)
    sent = jax.tree.map(jnp.subtract, total, waiting)
    return {**update, "params": sent}, waiting


HELD_BACK = Uplink(init, send=send, section=HeldBack)
"""
USE = """
import contextlib
import io
import sys

import numpy as np
import tsfl_jax
from tsfl_jax import __main__ as commands
from tsfl_jax.config import replace
from tsfl_jax.prepare import prepare
from tsfl_jax.run import runner

config = tsfl_jax.Config(algorithm="root", num_intervals=2, num_clients=4, batch_size=8)
config.schedule.size_groups, config.report_every = "constant(8); constant(32)", 2
config.data.name, config.data.spread = "blobs", 0.5
config.partition.kind, config.partition.share = "skewed", 0.75
config.model.name, config.model.bias, config.devices = "linear", False, 1
prepared = prepare.prepare(config)
for indices, n in zip(prepared.partition.indices, [8, 32, 8, 32], strict=True):
    assert (prepared.dataset.y_train[indices[:n]] == 0).sum() == 0.75 * n
swept = tsfl_jax.sweep(config, {"root.power": [0.0, 0.5, 1.0]}, workdir="sweep")
rho = swept.history["rho"]
np.testing.assert_allclose(rho[0], 0.25, rtol=1e-6)
np.testing.assert_allclose(rho[2, :, 3] / rho[2, :, 0], 4, rtol=1e-5)
timed = {"timeline.framework": "pairs", "timeline.quota": 4}
explained = str(tsfl_jax.explain(replace(config, timed)))
assert "root" in explained and "pairs (" in explained and "quota=4" in explained
# One client that holds back half: w^1 = w^0 + u/2 of the update u without the link.
alone = {"num_clients": 1, "num_intervals": 1, "uplink.chain": "held_back"}
alone |= {"schedule.size_groups": "constant(32)"}
start, half, whole = (
    np.asarray(result.params["params"]["Dense_0"]["kernel"])
    for result in (
        tsfl_jax.simulate(replace(config, alone | changes))
        for changes in ({"lr": 1e-30}, {}, {"held_back.part": 0.0})
    )
)
np.testing.assert_allclose(half, (whole + start) / 2, rtol=1e-5, atol=1e-7)
runs = {  # in every way of training
    "fedavg": {"cohort.size": 2},
    "median": {},
    "fedbuff": {"timeline.framework": "fedbuff", "timeline.buffer": 2},
}
for rule in sys.argv[1:]:
    changes = runs[rule]
    changed = replace(config, {"algorithm": rule} | changes)
    plain = tsfl_jax.simulate(changed).history["test_loss"]
    linked = replace(changed, {"uplink.chain": "held_back"})
    swept = tsfl_jax.sweep(linked, {"held_back.part": [0.0, 0.5]}).history["test_loss"]
    np.testing.assert_allclose(swept[0], plain, rtol=1e-5, err_msg=rule)
    assert swept[1, -1] != swept[0, -1], rule
experiment = runner.build(replace(linked, {"report_every": 1}))
try:
    runner.run(experiment, "run", stop=lambda: True)
    raise AssertionError("expected to be stopped")
except KeyboardInterrupt:
    resumed = runner.run(experiment, "run").history
np.testing.assert_array_equal(resumed["test_loss"], swept[1])
with contextlib.redirect_stdout(io.StringIO()) as listed:
    commands.list_settings([])
for name in ("data.spread", "partition.share", "model.bias", "timeline.quota"):
    assert f"--config.{name}=" in listed.getvalue()
assert "--config.root.power=0.5  (float)" in listed.getvalue()
for wrong in (
    {"root.power": 2.0},
    {"uplink.chain": "held_bak"},
    {"root.power": 0.0, "algorithm": "dms"},
    {"held_back.part": 0.25},
    {"data.name": "digits"},
    {"partition.kind": "iid"},
    {"model.name": "mlp"},
    {"timeline.quota": 4},
):
    try:
        tsfl_jax.simulate(replace(config, wrong))
    except tsfl_jax.UserError as error:
        print(error)
"""


# The setting that chooses → a part: its file and text, its name, and its row.
PARTS = {
    "algorithm": ("rules/root.py", NEW_RULE, "root", "ROOT"),
    "data.name": ("data/blobs.py", SOURCE, "blobs", "Part(blobs, sections=(Blobs,))"),
    "partition.kind": (
        "data/skewed.py",
        PARTITION,
        "skewed",
        "Part(skewed, ('schedule.size_groups',), (Skewed,))",
    ),
    "model.name": (
        "models/linear.py",
        NETWORK,
        "linear",
        "Part(lambda k, own, form: Linear(k, own.bias), (), (LinearConfig,))",
    ),
    "timeline.framework": (
        "timeline/pairs.py",
        FRAMEWORK,
        "pairs",
        "Framework(pairs, sections=(FleetConfig, Pairs))",
    ),
    "uplink.chain": ("uplink/held_back.py", LINK, "held_back", "HELD_BACK"),
}
TABLES = {  # in the package: the file, and the line that begins it
    "algorithm": ("rules/__init__.py", "AGGREGATORS: dict[str, Aggregator] = {"),
    "data.name": ("data/builtin.py", "DATASETS = {"),
    "partition.kind": ("data/partition.py", "PARTITIONS = {"),
    "model.name": ("models/networks.py", "MODELS = {"),
    "timeline.framework": ("timeline/__init__.py", "FRAMEWORKS = {"),
    "uplink.chain": ("uplink/__init__.py", "UPLINKS: dict[str, Uplink] = {"),
}


@pytest.fixture
def process(tmp_path, monkeypatch, capsys):
    """Runs a program in this process, as one that has loaded nothing: (code, text).

    A process of its own would spend most of its time on imports.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(registry, "sources", {})

    def run(program, *words: str) -> tuple[int, str]:
        monkeypatch.delitem(sys.modules, "mine", raising=False)
        linecache.clearcache()
        monkeypatch.setattr(sys, "argv", ["tsfl", *words])
        code = 0
        try:
            program()
        except SystemExit as ended:
            code = ended.code
        return code, "".join(capsys.readouterr())

    return run


@pytest.fixture
def command(process):
    return functools.partial(process, __main__.main)


ALL_WAYS = ("fedavg", "median", "fedbuff")


@pytest.mark.parametrize(
    ("way", "rules"),
    [
        (file_with, ("fedbuff",)),
        pytest.param(file_with, ALL_WAYS, marks=pytest.mark.slow),
        pytest.param(copy_with, ALL_WAYS, marks=pytest.mark.slow),
    ],
)
def test_a_part_of_any_table_is_one_file_and_one_line(tmp_path, process, way, rules):
    """It trains, is swept in one program, explained, reported and documented."""
    way(tmp_path)
    is_file = (tmp_path / "mine.py").exists()
    (tmp_path / "use.py").write_text("import mine\n" * is_file + USE)
    if rules == ALL_WAYS:
        text = printed(tmp_path, "use.py", *rules)
    else:
        _, text = process(lambda: runpy.run_path("use.py"), *rules)
    outside, unknown, *ignored = text.splitlines()
    assert outside.startswith("--config.root.power=2.0: must be a finite float32")
    assert unknown.startswith("--config.uplink.chain=held_bak: unknown name; did you")
    assert ignored == [
        f"--config.{name}: would be ignored with --config.{chosen}; it belongs to {own}"
        for name, chosen, own in (
            ("root.power=0.0", "algorithm=dms", "root"),
            ("held_back.part=0.25", "uplink.chain=", "held_back"),
            ("data.spread=0.5", "data.name=digits", "blobs"),
            ("partition.share=0.75", "partition.kind=iid", "skewed"),
            ("model.bias=False", "model.name=mlp", "linear"),
            ("timeline.quota=4", "timeline.framework=none", "pairs"),
        )
    ]
    assert (tmp_path / "sweep" / "summary.md").exists()


def test_parts_of_a_file_on_the_command_line(tmp_path, command):
    file_with(tmp_path)
    small = "--config=digits_case3 --config.num_clients=4 --config.num_intervals=2 "
    small += "--config.partition.kind=iid --config.schedule.data_size=16 "
    small += "--config.schedule.interval_seconds=10 --config.devices=1 "
    chosen = "--config.timeline.framework=pairs --config.timeline.quota=3 "
    chosen += "--config.algorithm=root --config.schedule.kind=distribution "
    own = "--components=mine.py "
    code, settings = command("settings", *own.split(), "root")
    assert settings.startswith("--config.root.power=0.5  (float)")
    code, told = command(*f"explain {own}{small}{chosen}".split())
    assert code == 0, told
    assert "framework pairs (" in told and "quota=3" in told and "root on" in told
    swept = f"sweep {own}{small}{chosen}--sweep root.power=0,1 --workdir=swept"
    code, told = command(*swept.split())
    assert code == 0 and "root.power" in told, told
    words = f"run {own}{small}{chosen}--workdir=run".split()
    code, told = command(*words)
    assert code == 0, told
    # Another text of the program is another experiment.
    text = (tmp_path / "mine.py").read_text()
    (tmp_path / "mine.py").write_text(text.replace("** hparams", "** 2 ** hparams"))
    code, told = command(*words)
    assert code == 2 and "own algorithm=root" in told


@tsfl_jax.component("power")
class Power:
    """A custom rule that is its settings."""

    beta: float = tsfl_jax.setting(0.9, "β in ρ_i ∝ τ_i^β", low=0)

    def weights(self, info):
        return info.tau**self.beta


def small():
    config = tsfl_jax.Config(num_intervals=2, num_clients=4, batch_size=8)
    config.schedule.kind, config.schedule.data_size = "case1", 32
    config.report_every, config.devices = 2, 1
    return config


def test_a_custom_component_is_a_rule_that_can_be_swept():
    swept = tsfl_jax.sweep(small(), {"power.beta": [0.0, 0.5, 1.0]}, aggregator=Power())
    assert [row["power.beta"] for row in swept.rows] == [0.0, 0.5, 1.0]
    found = swept.history["rho"]
    np.testing.assert_allclose(found[:, 0, 3] / found[:, 0, 0], [1, 2, 4], rtol=1e-5)
    with pytest.raises(tsfl_jax.UserError, match="power.beta"):
        tsfl_jax.sweep(small(), {"power.beta": [-1.0]}, aggregator=Power())


def test_arrays_of_another_shape_are_answered_in_one_line():
    def combine(updates, state, received, hparams):
        return updates, state

    rules = {
        "weights have shape": tsfl_jax.rule(
            lambda s: weights_of(jnp.ones(3), jnp.ones(3, int))
        ),
        "combine gives another tree": tsfl_jax.rule(lambda s: s.tau, combine=combine),
    }
    for words, rule in rules.items():
        with pytest.raises(tsfl_jax.UserError, match=words):
            tsfl_jax.simulate(small(), aggregator=rule)


@tsfl_jax.component("remembering")
class Remembering:
    """A rule whose state gets no settings, so that `init` cannot be a method."""

    part: float = tsfl_jax.setting(0.5, "of the old mean", low=0, high=1)

    def weights(self, info):
        return info.size

    def init(self, params, counts):
        return params


def lengthen(update, state, info):
    return update, state


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        (
            {"aggregator": Remembering()},
            r"rule\(Remembering, …\): init takes \(self, p",
        ),
        ({"uplink": lengthen}, r"send takes \(update, state, info\); expected a func"),
        ({"uplink": 3}, "uplink.chain.* expected a Uplink or a function"),
        ({"framework": lambda: 1}, r"timeline.framework=\w+: simulate fails"),
        ({"lr_schedule": lambda t: [t, t]}, r"lr_schedule=\w+: make fails"),
    ],
)
def test_components_of_other_arguments_are_answered_in_one_line(parts, words):
    with pytest.raises(tsfl_jax.UserError, match=words):
        tsfl_jax.simulate(small(), **parts)
    with pytest.raises(tsfl_jax.UserError, match="has one of that name"):
        tsfl_jax.register("timeline.framework", "sfl", lambda fleet: None)


def test_links_of_the_same_name_are_both_in_the_chain():
    """Times 2, then times 3, by one function's two closures: 6."""

    def times(factor):
        def link(update, state, info, settings):
            return jax.tree.map(lambda u: factor * u, update), state

        return link

    prepared = prepare.prepare(small(), uplink=[times(2.0), times(3.0)])
    assert prepared.config.uplink.chain == "link,link_"
    update = {"params": {"w": jnp.ones(2)}}
    for link in prepared.uplinks:
        update, _ = link.send(update, (), None, None)
    assert update["params"]["w"].tolist() == [6, 6]


def test_a_schedule_of_ones_own_is_the_same_as_the_packages():
    """η_t = η min(1, (t + 1)/W), by the setting and by a function."""
    config = small()
    config.algorithm = "fedavg"
    rising = tsfl_jax.simulate(config, lr_schedule=lambda t: (t + 1) / 4)
    tsfl_jax.register("lr_schedule", "fourths", lambda t: (t + 1) / 4)
    chosen = ("constant", 4), ("fourths", 0), ("constant", 0)
    points = [{"lr_schedule": name, "lr_warmup": W} for name, W in chosen]
    warm, own, plain = tsfl_jax.sweep(config, points).history["test_loss"]
    np.testing.assert_array_equal(own, warm)
    np.testing.assert_array_equal(rising.history["test_loss"], warm)
    assert (plain != warm).any()


def times(factor):
    """A link that multiplies."""

    def link(update, state, info, settings):
        return jax.tree.map(lambda u: factor * u, update), state

    return link


def test_parts_keep_their_names():
    """Another part does not replace a registered one; the package's have theirs."""
    tsfl_jax.register("uplink.chain", "link", times(2.0))
    links = (times(3.0), UPLINKS["topk"], times(4.0))
    prepared = prepare.prepare(small(), uplink=links)
    assert prepared.config.uplink.chain == "link_,topk,link__"
    config = replace(small(), {"uplink.chain": "link"})
    update, _ = prepare.prepare(config).uplinks[0].send({"w": jnp.ones(1)}, (), 0, 0)
    assert update["w"].tolist() == [2]
    # It may send more than the package's clip.
    tsfl_jax.register("uplink.chain", "my_clip", times(5.0))
    config = replace(config, {"uplink.chain": "my_clip,noise", "algorithm": "fedavg"})
    with pytest.raises(tsfl_jax.UserError, match="noise needs a bound on each client"):
        prepare.prepare(config)


def make_component(section, name, has_default=True):
    """A rule whose weights do not depend on its setting."""
    fields = {"__annotations__": {name: float}, "weights": lambda self, info: info.tau}
    fields |= {name: tsfl_jax.setting(1.0)} if has_default else {}
    return tsfl_jax.component(section)(type(section.title() + name, (), fields))


def test_settings_of_ones_own_belong_to_one_component():
    old, shown = small(), repr(small())
    for section, name in (("lr", "a"), ("timeline", "local_iterations")):
        with pytest.raises(tsfl_jax.UserError, match="another component has --config"):
            tsfl_jax.register("algorithm", "mine", make_component(section, name))
    with pytest.raises(tsfl_jax.UserError, match="with defaults"):
        tsfl_jax.register("algorithm", "mine", make_component("needy", "a", False))
    assert repr(small()) == shown
    # Two that share a section, in one program; and a config from before.
    for name in ("first", "second"):
        tsfl_jax.register("algorithm", name, make_component("both", name))
    assert old == small() and old.both.second == 1
    points = [{"algorithm": "first", "both.first": 2.0}, {"algorithm": "second"}]
    swept = tsfl_jax.sweep(old, points)
    np.testing.assert_array_equal(*swept.history["test_loss"])


def test_data_of_ones_own_follow_the_seed_and_are_checked():
    def blobs(settings, seed):
        x = np.random.default_rng(seed).normal(size=(300, 4))
        y = np.arange(300) % 3
        return tsfl_jax.make_dataset(x, y, x[:9], y[:9], name="blobs")

    tsfl_jax.register("data.name", "blobs", blobs)
    config = replace(small(), {"data.name": "blobs", "model.name": "mlp"})
    runs = [replace(config, {"seed": seed}) for seed in (0, 1)]
    both = [run.fingerprints["data"] for run in prepare.prepare_all(runs)]
    single = [prepare.prepare(run).fingerprints["data"] for run in runs]
    assert both == single and both[0] != both[1]
    tsfl_jax.register(
        "partition.kind", "counts", lambda s, n, stock, rng: np.ones((4, 3))
    )
    tsfl_jax.register("data.name", "none", lambda settings, seed: None)
    for values, words in (
        ({"partition.kind": "counts"}, "rows of sum 1"),
        ({"data.name": "none"}, "expected a tsfl_jax.Dataset"),
    ):
        with pytest.raises(tsfl_jax.UserError, match=words):
            prepare.prepare(replace(config, values))


def test_a_failed_schedule_is_in_no_table():
    """All of the table are in one program, which it would break."""
    for bad in (lambda t: [t, t], jax.jit(lambda t: 1 / 0)):
        with pytest.raises(tsfl_jax.UserError, match="make fails"):
            prepare.prepare(small(), lr_schedule=bad)
    assert "lambda" not in registry.TABLES["lr_schedule"]


def test_a_longer_run_does_not_go_on_where_ones_own_may_read_its_length(tmp_path):
    tsfl_jax.register("lr_schedule", "last", Part(lambda t, h: 1 - t / h.lr_total))
    config = replace(small(), {"lr_schedule": "last", "algorithm": "fedavg"})
    tsfl_jax.simulate(config, workdir=tmp_path)
    with pytest.raises(tsfl_jax.UserError, match="choose a new --workdir"):
        tsfl_jax.simulate(replace(config, {"num_intervals": 4}), workdir=tmp_path)


@tsfl_jax.component("broken")
class Broken:
    """A rule with a check that fails."""

    part: float = tsfl_jax.setting(1.0)

    def weights(self, info):
        return info.tau

    def check(self, config, rule):
        raise KeyError("no such thing")


def test_a_check_that_fails_is_one_line():
    with pytest.raises(tsfl_jax.UserError, match=r"Broken.check fails \(KeyError"):
        prepare.prepare(small(), aggregator=Broken())


def test_a_network_of_ones_own_takes_tokens_and_arrays():
    class Embedded(nn.Module):
        scale: Any

        @nn.compact
        def __call__(self, x):
            return nn.Dense(3)(self.scale * nn.Embed(9, 2)(x).mean(1))

    module = Embedded(np.ones((1, 2), np.float32))
    tsfl_jax.register("model.name", "embedded", lambda classes, settings, form: module)
    x, y = np.arange(1800, dtype=np.int32).reshape(300, 6) % 9, np.arange(300) % 3
    tokens = tsfl_jax.make_dataset(x, y, x[:9], y[:9])
    config = replace(small(), {"model.name": "embedded"})
    assert prepare.prepare(config, dataset=tokens).network.size == 9 * 2 + 2 * 3 + 3
