"""The examples of docs/custom.md run, each as it stands, and what they rest on."""

import functools
import json
import pathlib

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tsfl_jax
from tests import examples
from tsfl_jax.config import replace
from tsfl_jax.engine import optimizers
from tsfl_jax.experiment import custom_hooks, lanes, prepare
from tsfl_jax.report import collect
from tsfl_jax.rules import averages, custom
from tsfl_jax.sections import LR_SCHEDULES
from tsfl_jax.types import Constants, UserError

EXAMPLES = examples.examples("custom.md", r"^## (.+?)\n(.*?)(?=^## |\Z)")


def run(title: str) -> tuple[dict, str]:
    """Variables and output of an example."""
    return examples.run(EXAMPLES[title])


def small() -> tsfl_jax.Config:
    """Two intervals of four clients on digits, by a rule that compiles quickly."""
    config = tsfl_jax.Config(num_intervals=2, num_clients=4, batch_size=8)
    config.algorithm = "fedavg"
    config.schedule.data_size = 32
    return config


def test_axes_of_samples():
    _, out = run("Axes of samples")
    seen = [line.partition("sees ")[2] for line in out.splitlines()]
    assert seen == ["float32 [B, 28, 28]", "float32 [B, 28, 28, 1]"]


def test_a_rule():
    variables, _ = run("A rule")
    rho = variables["result"].history["rho"]
    np.testing.assert_allclose(rho.sum(axis=1), 1, rtol=1e-6)
    assert np.ptp(rho) > 0.05


def test_a_rule_in_a_loop():
    _, out = run("A rule in a custom training loop")
    assert [line.split()[0] for line in out.splitlines()] == [
        *("fedavg", "median", "krum", "fedadam")
    ]


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


@pytest.mark.slow
def test_derivatives():
    _, out = run("Derivatives")
    assert "nan" not in out and "Array" in out


@pytest.mark.parametrize("name", ["fedadam", "fedyogi", "geometric_median"])
def test_what_does_not_move_has_a_derivative(name):
    """As a pixel that is 0 in every image: Δ = 0, and the root of v = 0."""
    rule, params = tsfl_jax.AGGREGATORS[name], {"w": jnp.ones(2)}
    state = tsfl_jax.init_rule(rule, params, num_clients=2)

    def moved(scale):
        updates = {"w": scale * jnp.array([[1.0, 0.0], [1.0, 0.0]])}
        new, _ = tsfl_jax.aggregate(rule, updates, params, state)
        return new["w"].sum()

    assert np.isfinite(jax.grad(moved)(1.0))


@pytest.mark.parametrize(("number", "normalize"), [(np.nan, True), (-0.2, False)])
def test_weights_that_cannot_be_used_are_counted(number, normalize):
    """In the two intervals of a short run; the model stays as it was."""

    def weights(info):
        return jnp.where(info.interval == 0, jnp.ones(4), number)

    chosen = small()
    chosen.num_intervals = 3
    rule = tsfl_jax.rule(weights, normalize=normalize)
    result = tsfl_jax.simulate(chosen, aggregator=rule)
    assert "in 2 of 3 intervals the rule's weights" in result.summary["notes"][-1]
    loss = result.history["test_loss"]
    assert loss[0] == loss[1] == loss[2] and result.summary["diverged_at"] is None
    [row] = tsfl_jax.sweep(chosen, {"seed": [0]}, aggregator=rule).rows
    assert "in 2 of 3 intervals the rule's weights" in row["notes"]
    known = tsfl_jax.simulate(chosen, aggregator=tsfl_jax.AGGREGATORS["fedavg"])
    assert not any("the rule's weights" in n for n in known.summary["notes"])


@pytest.mark.parametrize("by", ["update", "from_updates"])
def test_a_model_that_the_rule_makes_infinite_is_not_taken(by):
    """The last good model is kept, and the run ends there, as where clients diverge."""

    def update(mean, params, state, received, hparams):
        late = received.info.interval == 1
        return jax.tree.map(lambda w: jnp.where(late, jnp.inf, w), mean), state

    def from_updates(outputs, state, received, hparams):
        late = received.info.interval == 1
        return event_weights(received)._replace(
            rho=jnp.where(late, jnp.nan, received.rho)
        ), state

    def event_weights(received):
        missing = jnp.float32(jnp.nan)
        return tsfl_jax.Weights(received.rho, received.present, missing, missing)

    fields = {"update": update} if by == "update" else {"from_updates": from_updates}
    rule = tsfl_jax.rule(lambda info: info.size, **fields)
    chosen = small()
    chosen.num_intervals = 3
    result = tsfl_jax.simulate(chosen, aggregator=rule)
    assert result.summary["diverged_at"] == 2 and result.summary["num_discarded"] == 0
    assert all(np.isfinite(a).all() for a in jax.tree.leaves(result.params))
    first, last = result.history["test_loss"]
    assert np.isfinite(first) and first == last


def test_own_weights_have_a_border():
    info = custom.RoundInfo(
        *(None, None, jnp.array([1, 0, 3]), jnp.ones(3), None, None, None, None)
    )
    hparams = tsfl_jax.HParams()
    weights = tsfl_jax.rule(lambda s, h: s.size * h.lr).mixing.weights(info, hparams)
    np.testing.assert_allclose(weights.rho, [0.5, 0, 0.5])
    plain = tsfl_jax.rule(lambda s: s.size * 3, normalize=False)
    np.testing.assert_allclose(plain.mixing.weights(info, hparams).rho, [3, 0, 3])
    with pytest.raises(tsfl_jax.UserError, match=r"shape \[2\]; expected \[3\]"):
        tsfl_jax.rule(lambda s: jnp.ones(2)).mixing.weights(info, hparams)
    failing = tsfl_jax.rule(lambda s: s.size / {}["scale"])
    with pytest.raises(tsfl_jax.UserError, match=r"weights fail \(KeyError: 'scale'\)"):
        failing.mixing.weights(info, hparams)
    with pytest.raises(tsfl_jax.UserError, match="expected a function"):
        tsfl_jax.rule(3)
    with pytest.raises(tsfl_jax.UserError, match="expected one of"):
        tsfl_jax.rule(lambda s: s.size, updates=None)
    # Arguments with a default are the user's own parameters.
    several = [
        functools.partial(lambda s, power: s.tau**power, power=2),
        functools.partial(lambda power, s: s.tau**power, 2),
        lambda s, *, power=2: s.tau**power,
        lambda s, power=2: s.tau**power,
        lambda s, hparams=None: s.tau ** (2 + 0 * hparams.lr),
    ]
    for weights in several:
        found = tsfl_jax.rule(weights).mixing.weights(info, hparams).rho
        np.testing.assert_allclose(found, [0.1, 0, 0.9])
    for weights in (lambda: 3, lambda s, h, power: s.tau):
        with pytest.raises(tsfl_jax.UserError, match="others need a default"):
            tsfl_jax.rule(weights)


def test_constants_are_for_rules_that_ask_for_them():
    """Without being asked for they are not estimated: NaN weights, unless refused."""

    def by_smoothness(info):
        return info.size / (1 + info.constants.smoothness * info.tau)

    for rule, what in (
        (tsfl_jax.rule(by_smoothness), "constants"),
        (tsfl_jax.rule(jax.jit(by_smoothness)), "constants"),
        (tsfl_jax.rule(lambda s: s.size * s.constants[0]), "constants"),
        (tsfl_jax.rule(lambda s: s.size / s.gradients.variance), "gradients"),
    ):
        with pytest.raises(tsfl_jax.UserError, match=f"NoneType.*uses_{what}=True"):
            tsfl_jax.aggregate(rule, {"w": jnp.ones((2, 1))}, {"w": jnp.zeros(1)})
    with pytest.raises(tsfl_jax.UserError, match=r"expected sections=\(DMS,\)"):
        dms = tsfl_jax.rule(tsfl_jax.AGGREGATORS["dms"].mixing.weights)
        tsfl_jax.aggregate(dms, {"w": jnp.ones((2, 1))}, {"w": jnp.zeros(1)})
    with pytest.raises(tsfl_jax.UserError, match="info.constants"):
        tsfl_jax.simulate(small(), aggregator=tsfl_jax.rule(by_smoothness))
    rule = tsfl_jax.rule(jax.jit(by_smoothness), uses_constants=True)
    config = small()
    config.schedule.kind = "case1"
    rho = tsfl_jax.simulate(config, aggregator=rule).history["rho"]
    np.testing.assert_allclose(rho.sum(1), 1, atol=1e-6)
    assert np.all(rho[:, 0] > rho[:, 3])  # τ = 1 and 4, equal sizes
    given = tsfl_jax.HParams(constants=Constants(jnp.float32(1.0)))
    updates, start = {"w": jnp.asarray([4.0, 9.0])}, {"w": jnp.zeros(())}
    moved, _ = tsfl_jax.aggregate(rule, updates, start, tau=[1, 3], hparams=given)
    assert float(moved["w"]) == pytest.approx((4 / 2 + 9 / 4) / (1 / 2 + 1 / 4))


def test_a_model_of_nnx():
    variables, out = run("A model")
    assert out.splitlines() == ["(64, 32)", "['mean', 'var']"]
    result = variables["result"]
    assert set(result.params) == {"params", "state"}
    assert np.abs(np.asarray(result.params["state"]["norm"]["mean"])).max() > 0


def test_the_function_of_an_experiment_trains_what_its_arguments_say():
    """Also where the schedule that it was made of is the same for all clients."""
    config = small()
    config.num_intervals = 1
    config.schedule.kind, config.schedule.tau = "explicit", (2,)
    run, arguments = tsfl_jax.as_function(config)
    less = arguments.inputs._replace(tau=jnp.ones_like(arguments.inputs.tau))
    found, _ = jax.jit(run)(*arguments._replace(inputs=less))
    config.schedule.tau = (1,)
    run, arguments = tsfl_jax.as_function(config)
    expected, _ = jax.jit(run)(*arguments)
    for a, b in zip(
        jax.tree.leaves(found.params), jax.tree.leaves(expected.params), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


def test_a_loss_and_metrics(tmp_path):
    variables, _ = run("A loss and metrics")
    result, given = variables["result"], variables
    top = result.history["top_3"]
    assert top.shape == (2,) and (top >= result.history["test_accuracy"]).all()
    assert np.isfinite(top).all() and "metrics" not in result.history
    swept = tsfl_jax.sweep(
        given["config"],
        {"seed": [0]},
        loss=given["smoothed"],
        metrics={"top_3": given["top_3"]},
        workdir=tmp_path,
    )
    np.testing.assert_allclose(swept.history["top_3"], [top], rtol=1e-5)
    assert "top_3" in (tmp_path / "history.csv").read_text().splitlines()[0]


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


def test_outputs_that_are_no_numbers_are_no_results(tmp_path):
    given = {"model": Broken(), "loss": of_known, "workdir": tmp_path}
    result = tsfl_jax.simulate(small(), **given)
    summary, history = result.summary, result.history
    assert summary["diverged_at"] is None and summary["num_discarded"] == 0
    assert (history["test_accuracy"] == 0).all()  # it was the share of class 0
    assert (history["test_loss"] == np.inf).all()
    assert summary["final_test_loss"] == np.inf
    assert any("infinite or NaN in 2 tested" in note for note in summary["notes"])
    source = collect.read_source(tmp_path)
    assert source.missing == []
    assert not np.isfinite(source.runs[0].facts["final_test_loss"])


@pytest.mark.slow
def test_tokens():
    variables, _ = run("Tokens")
    history = variables["result"].history
    assert history["test_accuracy"][-1] > 0.6
    notes = variables["result"].summary["notes"]
    assert any("tokens, given to the network as they are" in note for note in notes)
    with pytest.raises(tsfl_jax.UserError, match="taken for tokens"):
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


@pytest.mark.parametrize("mapping", ["sequential", "vmap"])
def test_a_step_knows_its_number(mapping):
    def counting(step):
        made = step.apply(step.gradient(step.variables["params"]))
        return made._replace(loss=jnp.float32(step.k) * step.mask.sum())

    config = small()
    config.mapping = mapping
    config.schedule.kind, config.schedule.tau = "explicit", (3,)
    found = tsfl_jax.simulate(config, client_step=counting)
    steps = 3 * config.schedule.data_size // config.batch_size
    np.testing.assert_allclose(found.history["train_loss"], (steps - 1) / 2)


MIXED = {
    "soft labels": np.float32([[0.2, 0.8], [0.9, 0.1], [0.5, 0.5], [1, 0]]),
    "numbers": np.float32([0.5, -1.5, 2.0, 0.25]),
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
def test_soft_labels_and_regression():
    _, out = run("Soft labels and regression")
    error, score = map(float, out.split())
    assert error < 0.3 and score > 0.9


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


@pytest.mark.slow
def test_heads_of_the_clients_own():
    variables, _ = run("A head of each client's own")
    assert variables["result"].history["client_accuracy_mean"][-1] > 0.85


BAD = {
    "a mean": ({"loss": lambda o, y: (o - y[:, None]).mean()}, r"gives \[\] for 3"),
    "no loss": ({"loss": 3}, "expected a function"),
    "fails": ({"metrics": {"m": lambda o, y: o @ y}}, "fails"),
    "name": ({"metrics": {"rho": lambda o, y: y}}, "a name of the history"),
    "slots": ({"metrics": {"client": lambda o, y: y}}, "a name of the history"),
    "setting": ({"metrics": {"lr": lambda o, y: y}}, "or of a setting"),
    "half": ({"model": nn.Dense(10, param_dtype=jnp.bfloat16)}, "is bfloat16"),
    "word": ({"metrics": {"top 3": lambda o, y: y}}, "is no identifier"),
    "dict": ({"metrics": [3]}, "expected a dict"),
    "augment": ({"augment": lambda k, x, y: (x[:2], y)}, "same shapes"),
    "augment dict": ({"augment": lambda k, x, y: {"x": x, "y": y}}, "gives {x: float"),
    "augment tree": ({"augment": lambda k, x, y: (x, (y,))}, r"\(int32\[8\],\)\) for"),
    "augment none": ({"augment": lambda k, x, y: None}, "augment gives None for"),
    "augment 3": ({"augment": 3}, "expected a function"),
    "step": ({"client_step": 3}, "expected a function"),
    "step fails": (
        {"client_step": lambda s: {}[2]},
        r"^client_step fails .KeyError: 2",
    ),
    "model": ({"model": lambda rngs: 3}, "makes no network"),
    "class": ({"model": nn.Dense}, "expected an instance"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_work_is_one_line(case):
    given, message = BAD[case]
    with pytest.raises(tsfl_jax.UserError, match=message) as error:
        tsfl_jax.simulate(small(), **given)
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_a_partition(tmp_path):
    variables, _ = run("A partition")
    tau = variables["result"].history["samples"]
    assert tau.shape == (2,)
    data, config = variables["data"], variables["config"]
    lists = variables["lists"]
    own_lists = prepare.prepare(config, dataset=data, partition=lists)
    rows, capacity = own_lists.partition.indices, own_lists.partition.capacity
    assert capacity.tolist() == [100, 310]
    for i, wanted in enumerate(lists):
        assert sorted(rows[i, : capacity[i]]) == wanted.tolist()
    assert (own_lists.workload.schedule.size == [[100, 310]] * 2).all()
    file = tmp_path / "data.npz"
    arrays = dict(
        zip(("x_train", "y_train", "x_test", "y_test"), data[1:5], strict=True)
    )
    np.savez(file, client=data.client * 7, **arrays)
    config = tsfl_jax.Config(num_intervals=2, num_clients=3)
    config.data.name, config.data.file = "npz", str(file)
    config.partition.kind = "client"
    natural = prepare.prepare(config)
    first = natural.partition.indices[0, : natural.partition.capacity[0]]
    assert (data.client[first] == 0).all() and len(first) == 500
    config.timeline.framework = "afl"
    times = prepare.prepare(config).workload.schedule
    assert (times.size == 500).all()


WRONG_LISTS = {
    "two": ([[0]], "num_clients=4: partition= has lists for 1"),
    "empty": ([[0], [1], [2], []], "client 3 has"),
    "beyond": ([[0], [1], [2], [10**6]], "client 3 has index 1000000"),
    "twice": ([[0], [1], [2], [3, 3]], "a sample twice"),
    "number": (3, "expected a list"),
}


@pytest.mark.parametrize("case", WRONG_LISTS)
def test_wrong_partitions(case):
    lists, message = WRONG_LISTS[case]
    config = tsfl_jax.Config(num_clients=4, batch_size=1)
    with pytest.raises(tsfl_jax.UserError, match=message):
        prepare.prepare(config, partition=lists)


def test_given_samples_refuse_settings_of_sizes():
    with pytest.raises(tsfl_jax.UserError, match="schedule.data_size=32: would be"):
        prepare.prepare(small(), partition=[[0], [1], [2], [3]])
    config = tsfl_jax.Config()
    config.partition.kind = "client"
    with pytest.raises(tsfl_jax.UserError, match="does not say which client"):
        prepare.prepare(config)


@pytest.mark.slow
def test_a_schedule_and_a_fleet_from_files(monkeypatch):
    monkeypatch.chdir(pathlib.Path(__file__).parents[1])
    _, out = run("A schedule or a fleet from files")
    first, second = out.splitlines()
    assert "1 of 6 pairs of interval and client have no row" in first
    assert second.endswith(
        "online.csv: 1 of 3 clients have no row and are always online"
    )


def test_a_subset_keeps_the_clients_of_its_samples(tmp_path):
    x = np.arange(60, dtype=np.float32)[:, None]
    file, y = tmp_path / "data.npz", np.arange(60) % 3
    np.savez(file, x_train=x, y_train=y, x_test=x, y_test=y, client=np.arange(60) // 15)
    config = tsfl_jax.Config(num_clients=4, num_intervals=1, batch_size=1)
    config.data.name, config.data.file = "npz", str(file)
    config.data.train_size, config.partition.kind = 40, "client"
    made = prepare.prepare(config)
    data = made.dataset
    np.testing.assert_array_equal(data.client, data.x_train[:, 0] // 15)
    assert made.partition.capacity.sum() == 40


@pytest.mark.slow
def test_an_optimizer_and_a_learning_rate_that_varies():
    variables, _ = run("An optimizer and a learning rate that varies")
    assert variables["swept"].history["test_accuracy"].shape == (2, 4)


def test_learning_rates_of_intervals():
    hparams = tsfl_jax.HParams(lr=0.5, lr_decay=0.25, lr_every=2.0, lr_total=4.0)

    def rates(kind):
        given = hparams._replace(lr_schedule=[*LR_SCHEDULES].index(kind))
        of = jax.vmap(lambda t: optimizers.in_interval(given, t).lr)
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
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        two.params,
        short.params,
    )


def test_schedules_of_the_learning_rate_share_a_program():
    several = []
    for kind, decay in (("constant", 0.1), ("cosine", 0.2), ("steps", 0.3)):
        config = small()
        config.lr_schedule, config.lr_decay = kind, decay
        several.append(prepare.prepare_validated(config, custom_hooks.Own()))
    groups, causes = lanes.group(several)
    assert groups == [[0, 1, 2]] and not causes


@pytest.mark.parametrize("name", ["fedadam", "dms"])
def test_a_rule_of_the_table_is_the_same_by_name_and_as_an_argument(name):
    by_name = tsfl_jax.simulate(replace(small(), {"algorithm": name}))
    given = tsfl_jax.simulate(small(), aggregator=tsfl_jax.AGGREGATORS[name])
    np.testing.assert_array_equal(
        by_name.history["test_loss"], given.history["test_loss"]
    )
    assert given.summary["algorithm"] == name


def test_the_files_name_a_rule_of_the_table(tmp_path):
    rule, config = tsfl_jax.AGGREGATORS["fedadam"], small()
    tsfl_jax.simulate(config, aggregator=rule, workdir=tmp_path / "run")
    settings = json.loads((tmp_path / "run/config.json").read_text())
    assert settings["algorithm"] == "fedadam" != config.algorithm
    tsfl_jax.sweep(config, {"seed": [0]}, aggregator=rule, workdir=tmp_path / "sweep")
    swept = json.loads((tmp_path / "sweep/sweep.json").read_text())
    assert swept["config"]["algorithm"] == "fedadam"
    config.algorithm = "fedadam"  # the same experiment
    tsfl_jax.simulate(config, workdir=tmp_path / "run")


@pytest.mark.parametrize(
    "rule", [tsfl_jax.AGGREGATORS["fedadam"], tsfl_jax.rule(lambda s: s.size)]
)
def test_a_sweep_of_rules_beside_a_rule_of_the_users_is_refused(rule):
    axes = {"algorithm": ["dms", "fedavg"]}
    with pytest.raises(UserError, match="algorithm: would be ignored with aggregator="):
        tsfl_jax.sweep(small(), axes, aggregator=rule)


def test_a_rule_of_the_table_is_checked_as_by_name():
    limited = replace(small(), {"algorithm": "dms", "dms.weight_limit": 2.0})
    with pytest.raises(UserError, match=r"dms\.weight_limit=2.0.*above θ/N"):
        tsfl_jax.simulate(limited, aggregator=tsfl_jax.AGGREGATORS["dms_adaptive"])


def test_an_own_rule_has_its_own_server_step():
    # Another rule than those of the table.
    copy = tsfl_jax.AGGREGATORS["fedadam"]._replace(label="a copy")
    config = replace(small(), {"algorithm": "dms"})
    found = prepare.hparams_of(config, copy)
    assert float(found.settings["fedopt"].lr) == pytest.approx(0.01)


@pytest.mark.parametrize(
    "settings",
    [
        {"clip_norm": 0.1},
        {"lr_schedule": "exponential", "lr_decay": 0.9},
        {"momentum": 0.5},
    ],
)
def test_settings_that_a_given_optimizer_would_ignore_are_refused(settings):
    config = replace(small(), settings)
    with pytest.raises(UserError, match="would be ignored, since optimizer="):
        prepare.prepare(config, optimizer=optax.sgd(0.05))
    # A function of the hyper-parameters may read them.
    prepare.prepare(config, optimizer=lambda h: optax.sgd(h.lr))
