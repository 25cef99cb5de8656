"""Networks in bfloat16 and TF32 with float32 master weights."""

import collections
import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import tsfl_jax
from tests.problems import small
from tsfl_jax.models import losses, networks, replay
from tsfl_jax.models.precision import takes_algorithm, with_precision
from tsfl_jax.prepare import backend, prepare
from tsfl_jax.prepare import network as of_experiment
from tsfl_jax.prepare.custom_hooks import Custom
from tsfl_jax.run import lanes

KEY = jax.random.key(0)


@functools.partial(jax.jit, static_argnums=0)
def loss_and_gradient(model, variables, x, y):
    mask = jnp.ones(len(y), bool)

    def loss(params):
        outputs, changed = model.train({**variables, "params": params}, x, mask, KEY)
        return losses.cross_entropy(outputs, y).mean(), (outputs, changed)

    return jax.value_and_grad(loss, has_aux=True)(variables["params"])


@pytest.mark.parametrize("precision", ["tf32", "bfloat16"])
def test_gradients_are_those_of_float32_within_the_rounding(precision):
    model = networks.from_flax(networks.MnistCNN())
    x = jax.random.uniform(KEY, (8, 28, 28, 1))
    y = jnp.arange(8)
    variables = jax.jit(model.init)(KEY, x)
    lower = with_precision(model, precision)
    (exact, _), expected = loss_and_gradient(model, variables, x, y)
    (found, (outputs, changed)), gradient = loss_and_gradient(lower, variables, x, y)
    assert outputs.dtype == jnp.float32
    kinds = {a.dtype for a in jax.tree.leaves((changed, gradient))}
    assert kinds == {jnp.dtype("float32")}
    np.testing.assert_allclose(found, exact, rtol=0.02)
    trees = optax.tree.sub(gradient, expected), expected
    norms = [optax.tree.norm(tree) for tree in trees]
    if precision == "bfloat16":
        # Pooling picks other maxima among values that round to the same number.
        assert 1e-4 * norms[1] < norms[0] < 0.15 * norms[1]
    else:  # a CPU has no TF32
        assert norms[0] < 1e-5 * norms[1]


def test_statistics_of_batches_stay_float32():
    model = networks.from_flax(networks.VGG11(norm="batch"))
    x = jax.random.uniform(KEY, (2, 32, 32, 3))
    shapes = jax.eval_shape(model.init, KEY, x)
    lower = with_precision(model, "bfloat16")
    mask = jax.ShapeDtypeStruct((2,), bool)
    _, changed = jax.eval_shape(lower.train, shapes, x, mask, KEY)
    kinds, expected = (jax.tree.map(lambda a: a.dtype, t) for t in (changed, shapes))
    assert kinds == expected


def products(function, *arguments):
    """Matrix products and convolutions of a function: operands, precision, count."""
    found = collections.Counter()
    for line in jax.jit(function).lower(*arguments).as_text().splitlines():
        if re.search(r"stablehlo\.(dot_general|convolution)", line):
            operand = re.findall(r": \(tensor<[\dx]*(\w+)>", line)[0]
            precision = set(re.findall(r"\b(HIGHEST|HIGH|DEFAULT)\b", line))
            if "accumulation_type = f32" in line and "operations = 6" in line:
                precision = {"X6"}
            found[operand, *(precision or {"DEFAULT"})] += 1
    return found


def of_run(config):
    run, arguments = tsfl_jax.as_function(config)
    return products(run, *arguments)


def test_aggregation_in_ones_own_loop_is_in_float32():
    rule, params = tsfl_jax.AGGREGATORS["oracle"], {"w": jnp.ones((3, 2))}
    state = tsfl_jax.init_rule(rule, params, num_clients=4, size=[1] * 4)

    def aggregate(updates):
        given = {"validation": lambda w: (w["w"] ** 2).sum()}
        return tsfl_jax.aggregate(rule, updates, params, state, **given)

    assert set(products(aggregate, {"w": jnp.ones((4, 3, 2))})) == {("f32", "HIGHEST")}


@pytest.mark.slow
def test_products_are_what_the_setting_says_on_every_device():
    """A GPU takes TF32 for products that do not say more: float32 has to be said."""
    config = tsfl_jax.Config(num_intervals=2, num_clients=4, batch_size=8)
    config.algorithm, config.convolution = "dms_adaptive", "fast"
    config.data.name, config.model.name = "synthetic", "mnist_cnn"
    config.data.validation, config.schedule.data_size = 8, 16
    full = of_run(config)
    assert set(full) == {("f32", "HIGHEST")}
    config.precision = "tf32"
    found = of_run(config)
    assert set(found) == {("f32", "HIGHEST"), ("f32", "HIGH")}
    assert found.total() == full.total() and found["f32", "HIGH"] >= 12
    config.precision = "bfloat16"
    found = of_run(config)
    assert set(found) <= {("f32", "HIGHEST"), ("bf16", "DEFAULT"), ("bf16", "HIGHEST")}
    assert found["bf16", "DEFAULT"] >= 12


@pytest.mark.slow
def test_estimates_of_a_short_step_are_those_of_float32():
    """A step of 3e-4 ‖g‖ vanishes in bfloat16's 8 bits: L was ten times too small."""
    config = small(algorithm="dms", lr=3e-4, num_intervals=1)
    full = tsfl_jax.simulate(config)
    config.precision = "bfloat16"
    found = tsfl_jax.simulate(config)
    for name in ("smoothness", "grad_sq_norm", "grad_variance", "coupling"):
        np.testing.assert_allclose(
            found.history[name], full.history[name], rtol=1e-4, err_msg=name
        )


X6 = lax.DotAlgorithmPreset.BF16_BF16_F32_X6
H100 = collections.namedtuple("Device", "compute_capability")("9.0")


def terms(values, truncated):
    """Three numbers of bfloat16 that a float32 is the sum of, as float64."""
    found = []
    for _ in range(3):
        if truncated:
            part = (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
        else:
            part = values.astype(jnp.bfloat16).astype(np.float32)
        found.append(part.astype(np.float64))
        values = values - part
    return found


def emulated(a, b, most, truncated=False):
    """Σ a_i b_j with i + j ≤ most, exact: the products have 16 bits."""
    pairs = enumerate(terms(a, truncated), 1), enumerate(terms(b, truncated), 1)
    lefts, rights = map(list, pairs)
    return sum(x * y for i, x in lefts for j, y in rights if i + j <= most)


def tf32(values):
    """float32 with 10 bits after the point, ties up in size."""
    bits = values.view(np.uint32) + np.uint32(1 << 12)
    return (bits & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)


def test_six_products_of_bfloat16_by_hand():
    v = np.array([1 + 2**-8 + 2**-17], np.float32)
    # The first term is above the middle of 1 and 1 + 2^-7; of the rest, nine ones, the
    # eighth rounds up. Truncated, what is cut off stays positive.
    assert terms(v, False) == [1 + 2**-7, -(2**-8), 2**-17]
    assert terms(v, True) == [1, 2**-8, 2**-17]
    square = v.astype(np.float64) ** 2
    assert emulated(v, v, 4) == square + 2**-24 - 2**-34
    assert emulated(v, v, 4, truncated=True) == square - 2**-24 - 2**-34
    # Three products lack a_2 b_2 and the third terms, TF32 the last bit of each.
    lost = emulated(v, v, 3) - emulated(v, v, 4)
    assert lost == -(2**-16) - 2 * (1 + 2**-7) * 2**-17
    assert tf32(v) == 1 + 2**-8


@pytest.mark.parametrize(
    ("truncated", "bound"),
    [(False, 2**-24 * (1 + 2**-10)), (True, 2**-21 * (1 + 2**-9))],
)
def test_six_products_of_bfloat16_are_a_product_of_float32(truncated, bound):
    draw = np.random.default_rng(0)
    fractions = draw.integers(2**23, 2**24, (2, 10**6)) * 2.0**-23
    signs, powers = draw.choice([-1, 1], (2, 10**6)), draw.integers(-40, 40, (2, 10**6))
    # Near powers of two terms are largest by their number.
    fractions[:, ::2] = 1 + draw.integers(0, 2**16, (2, 10**6))[:, ::2] * 2.0**-23
    a, b = (signs * fractions * 2.0**powers).astype(np.float32)
    exact = a.astype(np.float64) * b.astype(np.float64)  # of 48 bits

    def error(found):
        return np.abs(found - exact) / np.abs(exact)

    assert (sum(terms(a, truncated)) == a).all()
    worst = error(emulated(a, b, 4, truncated)).max()
    assert bound / 4 < worst <= bound
    assert error(emulated(a, b, 3, truncated)).max() > 64 * bound / 8**truncated
    assert error(tf32(a) * tf32(b)).max() > 2**-11


class Own(nn.Module):
    """A convolution and a dense layer, for inputs of one type."""

    dtype: str = "float32"

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(4, (3, 3))(x).reshape(len(x), -1)
        return nn.Dense(10, dtype=self.dtype)(x)


def of_training(module, form):
    """A model, and shapes of its variables and inputs."""
    model, x = networks.from_flax(module), jax.ShapeDtypeStruct((8, 28, 28, 1), "f4")
    variables = jax.eval_shape(model.init, KEY, x)
    return replay.replay(model, form, variables, x)[0], variables, x


@pytest.mark.parametrize("module", [networks.MnistCNN(), Own()])
def test_every_product_of_training_takes_the_algorithm(module):
    model, variables, x = of_training(module, "slices")
    assert takes_algorithm(model, variables, x)
    fast = with_precision(model, "float32", X6)
    y = jax.ShapeDtypeStruct((8,), jnp.int32)
    found = products(lambda *a: loss_and_gradient(fast, *a), variables, x, y)
    assert set(found) == {("f32", "X6")} and found.total() >= 5
    assert set(products(fast.predict, variables, x)) == {("f32", "X6")}


@pytest.mark.parametrize("choice", ["float32", "highest"])
def test_where_there_is_no_algorithm_nothing_changes(choice):
    model = networks.from_flax(networks.MnistCNN())
    assert with_precision(model, choice) is model


@pytest.mark.parametrize(
    ("module", "form"), [(Own(), "lax"), (Own("bfloat16"), "slices")]
)
def test_networks_with_other_products_take_no_algorithm(module, form):
    """JAX would lower a convolution at the precision of TF32, and cast bfloat16."""
    assert not takes_algorithm(*of_training(module, form))


@pytest.mark.parametrize(
    ("capability", "choice", "algorithm"),
    [
        ("8.0", "float32", X6),
        ("9.0", "float32", X6),
        ("9.0", "highest", None),
        ("9.0", "tf32", None),
        ("8.9", "float32", None),  # tensor cores only twice as fast
        ("gfx90a", "float32", None),
    ],
)
def test_gpus_that_multiply_on_tensor_cores(capability, choice, algorithm):
    device = H100._replace(compute_capability=capability)
    assert backend.algorithm(choice, device) is algorithm
    assert backend.algorithm(choice, jax.devices()[0]) is None


@pytest.mark.parametrize(
    ("form", "way"), [("slices", "tensor cores, BF16_BF16"), ("lax", "FP32 cores: it")]
)
def test_a_note_says_how_products_are_computed(form, way):
    config = small(convolution=form, model__name="mnist_cnn", hidden=None)
    config = tsfl_jax.config.replace(config, {"data.name": "synthetic"})
    made = prepare.prepare_validated(config, Custom())
    found = of_experiment.with_precision(made.network, made.dataset, "float32", H100)
    assert f"in float32 are on {way}" in found.notes[-1]
    assert (found.algorithm is X6) == (form == "slices")
    assert not any("FP32 cores" in note for note in made.notes)


def test_a_run_that_computed_products_otherwise_is_refused(monkeypatch, tmp_path):
    config = small(num_intervals=1, algorithm="fedavg")
    tsfl_jax.simulate(config, workdir=tmp_path)
    monkeypatch.setattr(backend, "algorithm", lambda *_: X6)
    message = "another experiment .products of the network: – → .BF16_BF16_F32_X6"
    with pytest.raises(tsfl_jax.UserError, match=message):
        tsfl_jax.simulate(config, workdir=tmp_path)


@pytest.mark.parametrize("runs", [1, 2])
def test_runs_side_by_side_multiply_on_fp32_cores(runs):
    settings = {"num_intervals": 1, "algorithm": "fedavg", "mapping": "vmap"}
    configs = [small(seed=seed, **settings) for seed in range(runs)]
    several = [
        p._replace(network=p.network._replace(algorithm=X6))
        for p in prepare.prepare_all(configs)
    ]
    group = lanes.make_group(several, backend.start_jax(configs[0]))
    arrays = lanes.make_arrays(group, several)
    arguments = group.program.arguments(arrays, arrays.start, 0)
    text = group.program.lower(*arguments).as_text()
    assert ("algorithm = <" in text) == (runs == 1)
