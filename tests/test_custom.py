"""The examples of docs/custom.md run, each as it stands, and what they rest on."""

import functools
import json
import pathlib
import re

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import tsfl_jax
from tests import examples
from tsfl_jax.config import replace
from tsfl_jax.engine import optimizers
from tsfl_jax.prepare import prepare
from tsfl_jax.rules import averages, custom
from tsfl_jax.sections import LR_SCHEDULES
from tsfl_jax.types import Constants, UserError

EXAMPLES = examples.examples("custom.md", r"^## (.+?)\n(.*?)(?=^## |\Z)")


def run(title: str) -> tuple[dict, str]:
    """Variables and output of an example."""
    return examples.run(EXAMPLES[title])


def small(**settings) -> tsfl_jax.Config:
    """Two intervals of four clients on digits, by a rule that compiles quickly."""
    values = {"num_intervals": 2, "num_clients": 4, "batch_size": 8}
    values |= {"algorithm": "fedavg", "schedule.data_size": 32}
    return replace(tsfl_jax.Config(), values | settings)


def history(variables):
    """The history of an example's only run."""
    return variables["result"].history


def check_model(variables, out):
    """Batch statistics moved, and the module's outputs are those of the test."""
    config, result = variables["config"], variables["result"]
    outputs, _ = tsfl_jax.predict(config, result.params, model=variables["Net"])
    data = prepare.load_dataset(config)
    x = ((data.x_test - data.mean) / data.std).astype(np.float32)
    logits = variables["network"](x)
    np.testing.assert_allclose(logits, outputs, rtol=1e-4, atol=1e-5)
    assert np.abs(variables["network"].norm.mean).max() > 0
    with pytest.raises(UserError, match=r"has other parameters \(KeyError"):
        result.module(lambda rngs: nnx.Linear(64, 10, rngs=rngs))
    return out.splitlines() == ["(64, 32)", "['mean', 'var']", "(32,) (2, 10)"]


NO_ROW = "1 of 6 pairs of interval and client have no row"
# Title of an example → what holds of its variables and its output.
CHECKS = {
    "Axes of samples": lambda v, out: "[B, 28, 28]\n" in out and "28, 28, 1]" in out,
    "A rule": lambda v, out: np.ptp(history(v)["rho"]) > 0.05,
    "A rule in a custom training loop": lambda v, out: (
        re.findall(r"^\w+", out, re.M) == ["fedavg", "median", "krum", "fedadam"]
    ),
    "A model": check_model,
}
SLOW_CHECKS = {
    "Derivatives": lambda v, out: "nan" not in out and "Array" in out,
    "Soft labels and regression": lambda v, out: (
        float(out.split()[0]) < 0.3 and float(out.split()[1]) > 0.9
    ),
    "A head of each client's own": lambda v, out: (
        history(v)["client_accuracy_mean"][-1] > 0.85
    ),
    "An optimizer and a learning rate that varies": lambda v, out: (
        v["swept"].history["test_accuracy"].shape == (2, 4)
    ),
    "A schedule or a fleet from files": lambda v, out: NO_ROW in out,
}


@pytest.mark.parametrize(
    "title", [*CHECKS, *(pytest.param(t, marks=pytest.mark.slow) for t in SLOW_CHECKS)]
)
def test_an_example(title, monkeypatch):
    monkeypatch.chdir(pathlib.Path(__file__).parents[1])
    assert (CHECKS | SLOW_CHECKS)[title](*run(title))


def test_batch_statistics_become_the_mean_whatever_the_server_s_step():
    """Variances 0.4 and 0.015 as updates of 1: a step of 2 would leave −0.2."""
    start = {"params": {"w": jnp.zeros(1)}, "batch_stats": {"var": jnp.ones(2)}}
    updates = {
        "params": {"w": jnp.array([[1.0], [3.0]])},
        "batch_stats": {"var": jnp.array([[-0.5, -0.98], [-0.7, -0.99]])},
    }
    rules = {n: tsfl_jax.AGGREGATORS[n] for n in ("fedbuff", "median", "scaffold")}
    hparams = tsfl_jax.HParams(settings={"server": averages.Server(lr=2.0)})
    for name, rule in rules.items():
        state = tsfl_jax.init_rule(rule, start, num_clients=2, size=[1, 1])
        given = {"hparams": hparams, "tau": [1, 1], "size": [1, 1]}
        moved, _ = tsfl_jax.aggregate(rule, updates, start, state, **given)
        np.testing.assert_allclose(moved["params"]["w"], [4.0], rtol=1e-6, err_msg=name)
        found = moved["batch_stats"]["var"]
        np.testing.assert_allclose(found, [0.4, 0.015], atol=1e-6, err_msg=name)


@pytest.mark.parametrize("name", ["fedadam", "geometric_median"])
def test_what_does_not_move_has_a_derivative(name):
    """As a pixel that is 0 in every image: Δ = 0, and the root of v = 0."""
    rule, params = tsfl_jax.AGGREGATORS[name], {"w": jnp.ones(2)}
    state = tsfl_jax.init_rule(rule, params, num_clients=2)

    def moved(scale):
        updates = {"w": scale * jnp.array([[1.0, 0.0], [1.0, 0.0]])}
        new, _ = tsfl_jax.aggregate(rule, updates, params, state)
        return new["w"].sum()

    assert np.isfinite(jax.grad(moved)(1.0))


def test_weights_that_cannot_be_used_are_counted():
    """In two intervals of a run; the model stays as it was."""

    def weights(info):
        return jnp.where(info.interval == 0, jnp.ones(4), -0.2)

    rule = tsfl_jax.rule(weights, normalize=False)
    result = tsfl_jax.simulate(small(num_intervals=3), aggregator=rule)
    loss, notes = result.history["test_loss"], result.summary["notes"][-1]
    assert "in 2 of 3 intervals the rule's weights" in notes
    assert loss[0] == loss[1] == loss[2]


def test_a_model_that_the_rule_makes_infinite_is_not_taken():
    """The last good model is kept, and the run ends there, as where clients diverge."""

    def update(mean, params, state, received, hparams):
        late = received.info.interval == 1
        return jax.tree.map(lambda w: jnp.where(late, jnp.inf, w), mean), state

    rule = tsfl_jax.rule(lambda info: info.size, update=update)
    result = tsfl_jax.simulate(small(num_intervals=3), aggregator=rule)
    assert result.summary["diverged_at"] == 2 and result.summary["num_discarded"] == 0
    assert all(np.isfinite(a).all() for a in jax.tree.leaves(result.params))
    first, last = result.history["test_loss"]
    assert np.isfinite(first) and first == last


def test_custom_weights_by_hand():
    """Normalized or not; arguments with a default are the user's own parameters."""
    info = custom.RoundInfo(
        *(None, None, jnp.array([1, 0, 3]), jnp.ones(3), None, None, None, None)
    )
    hparams = tsfl_jax.HParams()

    def rho(function, **options):
        return tsfl_jax.rule(function, **options).mixing.weights(info, hparams).rho

    np.testing.assert_allclose(rho(lambda s, h: s.size * h.lr), [0.5, 0, 0.5])
    np.testing.assert_allclose(rho(lambda s: s.size * 3, normalize=False), [3, 0, 3])
    for weights in (
        functools.partial(lambda s, power: s.tau**power, power=2),
        lambda s, power=2: s.tau**power,
        lambda s, hparams=None: s.tau ** (2 + 0 * hparams.lr),
    ):
        np.testing.assert_allclose(rho(weights), [0.1, 0, 0.9])
    for weights, words in (
        (lambda s: jnp.ones(2), r"shape \[2\]; expected \[3\]"),
        (lambda s, h, power: s.tau, "others need a default"),
    ):
        with pytest.raises(UserError, match=words):
            rho(weights)


@pytest.mark.slow
def test_constants_are_for_rules_that_ask_for_them():
    """Without being asked for they are not estimated: NaN weights, unless refused."""

    def by_smoothness(info):
        return info.size / (1 + info.constants.smoothness * info.tau)

    updates, start = {"w": jnp.asarray([4.0, 9.0])}, {"w": jnp.zeros(())}
    for function, quantity in (
        (jax.jit(by_smoothness), "constants"),
        (lambda s: s.size / s.gradients.variance, "gradients"),
    ):
        with pytest.raises(UserError, match=f"NoneType.*uses_{quantity}=True"):
            tsfl_jax.aggregate(tsfl_jax.rule(function), updates, start)
    with pytest.raises(UserError, match=r"expected sections=\(DMS,\)"):
        rule = tsfl_jax.rule(tsfl_jax.AGGREGATORS["dms"].mixing.weights)
        tsfl_jax.aggregate(rule, updates, start)
    rule = tsfl_jax.rule(jax.jit(by_smoothness), uses_constants=True)
    rho = tsfl_jax.simulate(
        replace(small(), {"schedule.kind": "case1"}), aggregator=rule
    ).history["rho"]
    np.testing.assert_allclose(rho.sum(1), 1, atol=1e-6)
    assert np.all(rho[:, 0] > rho[:, 3])  # τ = 1 and 4, equal sizes
    hparams = tsfl_jax.HParams(constants=Constants(jnp.float32(1.0)))
    moved, _ = tsfl_jax.aggregate(rule, updates, start, tau=[1, 3], hparams=hparams)
    assert float(moved["w"]) == pytest.approx((4 / 2 + 9 / 4) / (1 / 2 + 1 / 4))


def test_the_function_of_an_experiment_trains_what_its_arguments_say():
    """Also where the schedule that it was made of is the same for all clients."""
    explicit = {"schedule.kind": "explicit", "schedule.tau": (2,)}
    config = small(num_intervals=1, **explicit)
    run, arguments = tsfl_jax.as_function(config)
    less = arguments.inputs._replace(tau=jnp.ones_like(arguments.inputs.tau))
    found, _ = jax.jit(run)(*arguments._replace(inputs=less))
    config.schedule.tau = (1,)
    expected = tsfl_jax.simulate(config).params
    chex.assert_trees_all_close(found.params, expected, rtol=1e-5, atol=1e-7)


def test_a_loss_and_metrics():
    result = run("A loss and metrics")[0]["result"]
    top = result.history["top_3"]
    assert top.shape == (2,) and (top >= result.history["test_accuracy"]).all()
    assert np.isfinite(top).all() and "metrics" not in result.history


class Broken(nn.Module):
    """Outputs are NaN as soon as the bias has moved, gradients never."""

    @nn.compact
    def __call__(self, x):
        dense = nn.Dense(10)
        logits = dense(x.reshape(len(x), -1))
        moved = (dense.variables["params"]["bias"] != 0).any()
        return logits + jax.lax.stop_gradient(jnp.where(moved, jnp.nan, 0.0))


def of_known(outputs, labels):
    """A loss that is NaN with the outputs, while its gradients are finite."""
    known = jnp.where(jnp.isnan(outputs), 0.0, outputs)
    squares = ((known - jax.nn.one_hot(labels, 10)) ** 2).sum(-1)
    return squares + 0 * jax.lax.stop_gradient(outputs).sum(-1)


def test_outputs_that_are_no_numbers_are_no_results():
    result = tsfl_jax.simulate(small(), model=Broken(), loss=of_known)
    summary, history = result.summary, result.history
    assert summary["diverged_at"] is None and summary["num_discarded"] == 0
    assert (history["test_accuracy"] == 0).all()  # it was the share of class 0
    assert (history["test_loss"] == np.inf).all()
    assert summary["final_test_loss"] == np.inf


@pytest.mark.slow
def test_tokens():
    variables, _ = run("Tokens")
    history = variables["result"].history
    assert history["test_accuracy"][-1] > 0.6
    notes = variables["result"].summary["notes"]
    assert any("tokens, given to the network as they are" in note for note in notes)
    with pytest.raises(tsfl_jax.UserError, match="are tokens, which"):
        tsfl_jax.simulate(variables["config"], dataset=variables["data"])


@pytest.mark.slow
def test_augmentation_and_a_step():
    variables, _ = run("Augmentation and a custom step")
    config = small()
    both = variables["result"].history["train_loss"]
    plain = tsfl_jax.simulate(
        config,
        augment=lambda key, x, y: (x, y),
        client_step=lambda step: step.apply(step.gradient(step.variables["params"])),
    )
    nothing = tsfl_jax.simulate(config)
    jax.tree.map(np.testing.assert_array_equal, plain.params, nothing.params)
    assert (plain.history["train_loss"] != both).all()


def test_a_step_knows_its_number():
    def counting(step):
        made = step.apply(step.gradient(step.variables["params"]))
        return made._replace(loss=jnp.float32(step.k) * step.mask.sum())

    explicit = {"schedule.kind": "explicit", "schedule.tau": (3,)}
    config = small(mapping="vmap", **explicit)
    found = tsfl_jax.simulate(config, client_step=counting)
    steps = 3 * config.schedule.data_size // config.batch_size
    np.testing.assert_allclose(found.history["train_loss"], (steps - 1) / 2)


MIXED = {
    "soft labels": np.float32([[0.2, 0.8], [0.9, 0.1], [0.5, 0.5], [1, 0]]),
    "vectors": np.float32([[0.5, 3.0], [-1.5, 0.5], [2.0, -2.0], [0.25, 1.0]]),
}


def _mixed_by_hand(x, y, soft):
    """Six SGD steps of two clients with two samples each, averaged after three."""
    w, b = np.zeros((2, y[0].size)), np.zeros(y[0].size)
    for _ in range(2):
        models = []
        for client in (slice(0, 2), slice(2, 4)):
            inputs, targets = (0.7 * a + 0.3 * a[::-1] for a in (x[client], y[client]))
            client_w, client_b = w.copy(), b.copy()
            for _ in range(3):
                outputs = inputs @ client_w + client_b
                if soft:
                    shares = np.exp(outputs)
                    error = shares / shares.sum(axis=1, keepdims=True) - targets
                else:
                    error = 2 * (outputs - targets.reshape(2, -1)) / b.size
                client_w -= 0.1 * inputs.T @ error / 2
                client_b -= 0.1 * error.mean(axis=0)
            models.append((client_w, client_b))
        w, b = (np.mean(arrays, axis=0) for arrays in zip(*models, strict=True))
    return {"kernel": w, "bias": b}


@pytest.mark.parametrize("kind", MIXED)
def test_mixup_gets_what_the_loss_gets(kind):
    """In a batch of two samples, mixup does not depend on their order."""
    y, x = MIXED[kind], np.float32([[1, 2], [-1, 0.5], [0.3, -2], [2, 1]])
    data = tsfl_jax.make_dataset(x, y, x, y)
    config = tsfl_jax.Config(num_intervals=2, num_clients=2, batch_size=2, lr=0.1)
    config.algorithm, config.momentum = "fedavg", 0.0
    config.schedule.kind, config.schedule.tau = "explicit", (3,)
    shape = (2, y[0].size)
    given = {
        "augment": lambda key, *pair: [0.7 * a + 0.3 * a[::-1] for a in pair],
        "params": {"kernel": np.zeros(shape), "bias": np.zeros(shape[1:])},
        "partition": [[0, 1], [2, 3]],
    }
    result = tsfl_jax.simulate(config, model=nn.Dense(shape[1]), dataset=data, **given)
    expected = _mixed_by_hand((x - data.mean) / data.std, y, kind == "soft labels")
    for name, array in expected.items():
        found = result.params["params"][name]
        np.testing.assert_allclose(found, array, rtol=1e-5, atol=1e-6)
    wrong = given | {"augment": lambda key, x, y: (x, y.argmax(axis=-1))}
    with pytest.raises(UserError, match=r"augment gives .*int32.* for \(float32\[2, 2"):
        tsfl_jax.simulate(config, model=nn.Dense(shape[1]), dataset=data, **wrong)


@pytest.mark.slow
def test_adapters():
    variables, _ = run("Adapters")
    start = tsfl_jax.simulate(
        variables["config"],
        model=variables["Network"](),
        params=variables["result"].params,
    )
    for layer in ("first", "last"):
        found = start.params["params"][layer]["base"]
        known = variables["result"].params["params"][layer]["base"]
        jax.tree.map(np.testing.assert_array_equal, found, known)
    accuracy = start.history["test_accuracy"]
    assert accuracy[-1] > max(0.6, accuracy[0])


ADAM = tsfl_jax.AGGREGATORS["fedadam"]
RULES = {"algorithm": ["dms", "fedavg"]}
SIZES = {"schedule.data_size": tsfl_jax.Config().schedule.data_size}
# Settings, parts of a call of `simulate`, words of the answer; with axes: of `sweep`.
WRONG = [
    ({}, {"loss": lambda o, y: (o - y[:, None]).mean()}, "float32[] for 3"),
    ({}, {"model": nn.Dense(10, param_dtype=jnp.bfloat16)}, "makes bfloat16"),
    ({}, {"augment": lambda k, x, y: (x[:2], y)}, "same shapes"),
    (SIZES, {"partition": [[0]]}, "num_clients=4: partition= has samples of 1 clients"),
    ({}, {"aggregator": ADAM, "axes": RULES}, "would be ignored with aggregator="),
]


@pytest.mark.parametrize(("settings", "parts", "words"), WRONG)
def test_what_cannot_work_is_one_line(settings, parts, words):
    config = small(**settings)
    axes = [parts["axes"]] if "axes" in parts else []
    parts = {name: part for name, part in parts.items() if name != "axes"}
    with pytest.raises(UserError) as error:
        (tsfl_jax.sweep if axes else tsfl_jax.simulate)(config, *axes, **parts)
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.slow
def test_a_partition():
    variables, _ = run("A partition")
    tau = variables["result"].history["samples"]
    assert tau.shape == (2,)
    data, lists = variables["data"], variables["lists"]
    own_lists = prepare.prepare(variables["config"], dataset=data, partition=lists)
    rows, capacity = own_lists.partition.indices, own_lists.partition.capacity
    assert capacity.tolist() == [100, 310]
    for i, wanted in enumerate(lists):
        assert sorted(rows[i, : capacity[i]]) == wanted.tolist()
    assert (own_lists.workload.schedule.size == [[100, 310]] * 2).all()


def test_learning_rates_of_intervals():
    hparams = tsfl_jax.HParams(lr=0.5, lr_decay=0.25, lr_every=2.0, lr_total=4.0)

    def rates(kind):
        given = hparams._replace(lr_schedule=[*LR_SCHEDULES].index(kind))
        factors = optimizers.lr_factors()
        of = jax.vmap(lambda t: optimizers.in_interval(given, t, factors).lr)
        return of(jnp.arange(4))

    wanted = {
        "constant": [0.5] * 4,
        "exponential": [0.5, 0.125, 0.03125, 0.0078125],
        "steps": [0.5, 0.5, 0.125, 0.125],
        "cosine": [0.125 + 0.375 * (1 + np.cos(np.pi * t / 4)) / 2 for t in range(4)],
    }
    assert set(wanted) == set(LR_SCHEDULES)
    for kind, values in wanted.items():
        np.testing.assert_allclose(rates(kind), values, rtol=1e-6)


@pytest.mark.slow
def test_the_steps_of_a_schedule_of_optax_start_anew_in_every_interval():
    """Steps 0 and 1 of each interval learn, later ones do not, in every interval."""
    config = small()
    config.schedule.kind, config.schedule.tau = "explicit", (1,)
    config.schedule.iteration, config.batch_size = "pass", 8

    def only_two(hparams):
        schedule = optax.piecewise_constant_schedule(hparams.lr, {2: 0.0})
        return optax.sgd(schedule)

    two = tsfl_jax.simulate(config, optimizer=only_two)
    config.schedule.iteration, config.schedule.tau = "step", (2,)
    short = tsfl_jax.simulate(config, optimizer=lambda h: optax.sgd(h.lr))
    chex.assert_trees_all_close(two.params, short.params, rtol=1e-5, atol=1e-6)


def test_a_rule_of_the_table_has_its_name_as_an_argument_too(tmp_path):
    result = tsfl_jax.simulate(small(), aggregator=ADAM, workdir=tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    assert settings["algorithm"] == result.summary["algorithm"] == "fedadam"
