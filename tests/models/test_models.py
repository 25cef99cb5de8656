"""Networks and the fast convolution against XLA's own, values and gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from tests.models.numerics import close, outcomes
from tsfl_jax.models import convolution, networks, pooling, winograd
from tsfl_jax.models.networks import ModelConfig

IMAGES = {
    "mlp": (8, 8, 1),
    "mnist_cnn": (28, 28, 1),
    "mnist_dropout_cnn": (28, 28, 1),
    "fashion_cnn": (28, 28, 1),
    "vgg11": (32, 32, 3),
    "resnet18": (32, 32, 3),
}


def with_lax(stride=1, same=True):
    return lambda x, w: convolution.conv_lax(x, w, stride, same)


def pooled(x, w):
    return pooling.max_pool(convolution.conv_slices(x, w, 1, False))


def case(form, shape, kernel, reference=None, **settings):
    """A form of convolution, its reference, shapes of images and kernel."""
    reference = reference or with_lax(**settings)
    return lambda x, w: form(x, w, **settings), reference, shape, kernel


def winograd_cases(channels):
    for same in (True, False):
        for size, kernel in (((7, 6), (3, 1)), ((8, 9), (5, 5))):
            conv = winograd.conv_winograd
            yield case(conv, (channels, *size, 2), kernel, same=same)


SLICES, TAPS = convolution.conv_slices, convolution.conv_taps
FORMS = {
    "slices": [
        case(SLICES, (3, size, size + 1, 2), kernel, stride=stride, same=same)
        for size, stride, kernel in ((7, 2, (3, 3)), (8, 1, (5, 5)))
        for same in (True, False)
    ],
    "F(2, 3), F(2, 5)": [*winograd_cases(3)],
    "F(4, 3)": [*winograd_cases(64)],
    "taps": [
        case(TAPS, (3, *size, 2), kernel)
        for size, kernel in (((1, 1), (3, 3)), ((1, 2), (5, 3)), ((3, 2), (5, 3)))
    ],
    "quarters": [
        case(pooling.conv_pool_quarters, shape, (taps, taps), pooled)
        for shape, taps in (((1, 8, 6, 2), 5), ((3, 7, 9, 2), 2), ((3, 8, 8, 2), 3))
    ],
}


@pytest.mark.parametrize("name", FORMS)
def test_forms_equal_lax_convolution(name):
    """Output and both gradients in float64, where only the formula can differ."""
    draw = np.random.default_rng(0).normal
    ours, theirs, shapes, kernels = zip(*FORMS[name], strict=True)
    with jax.enable_x64():
        inputs = [
            (jnp.asarray(draw(size=shape)), jnp.asarray(draw(size=(*k, shape[0], 4))))
            for shape, k in zip(shapes, kernels, strict=True)
        ]
        close(outcomes(ours, inputs), outcomes(theirs, inputs))


QUARTERS = [  # shape, taps, filters, same, whether there are four products in one
    ((1, 8, 6, 2), 5, 4, False, True),
    ((3, 8, 6, 2), 3, 36, True, True),
    ((2, 6, 8, 2), 2, 4, True, True),  # padding after only
    ((3, 8, 6, 2), 3, 37, True, False),  # many filters
    ((2, 7, 8, 2), 3, 4, True, False),  # a pool with a last odd row
]


@functools.partial(jax.jit, static_argnums=0)
def pooled_twice(form, inputs):
    """Outputs and both gradients of all `QUARTERS`."""
    results = []
    for (x, kernel), (*_, same, _) in zip(inputs, QUARTERS, strict=True):
        pool = functools.partial(pooling.conv_pool, same=same, form=form)
        out, back = jax.vjp(pool, x, kernel)
        grad = (jnp.arange(out.size) % 7 - 3).astype(out.dtype)
        results.append((out, *back(grad.reshape(out.shape))))
    return results


def test_quarters_equal_slices_with_ties(monkeypatch):
    """Of small whole numbers all is exact: the first of equal outputs takes all."""
    random, used, inputs = np.random.default_rng(0), [], []
    real = pooling.conv_pool_quarters
    count = lambda x, kernel: used.append(kernel.shape) or real(x, kernel)  # noqa: E731
    monkeypatch.setattr(pooling, "conv_pool_quarters", count)
    for shape, taps, filters, *_ in QUARTERS:
        x = random.integers(0, 2, shape).astype(float)
        kernel = random.integers(-1, 2, (taps, taps, shape[0], filters)).astype(float)
        inputs.append((x, kernel))
    with jax.enable_x64():
        exact = pooled_twice("slices", inputs)
        assert not used
        jax.tree.map(
            np.testing.assert_array_equal, pooled_twice("quarters", inputs), exact
        )
    assert used == [
        (taps, taps, shape[0], filters)
        for shape, taps, filters, _, is_used in QUARTERS
        if is_used
    ]
    # Spread over the ties, or to the last one, gradients would differ: there are ties.
    x, kernel = inputs[0]
    taps = np.lib.stride_tricks.sliding_window_view(x, (5, 5), axis=(1, 2))
    outputs = np.einsum("chwbij,ijcf->fhwb", taps, kernel)
    corners = [outputs[:, i::2, j::2] for i in (0, 1) for j in (0, 1)]
    pooled = np.asarray(exact[0][0])
    assert (sum(corner == pooled for corner in corners) > 1).any()


def test_minimal_filtering_by_hand():
    # F(4, 3) has the matrices of Lavin and Gray, section 4.3, to the points' order.
    at, g, bt = winograd.cook_toom(3)
    assert at[1] == [0, 1, -1, 2, -2, 0] and at[3] == [0, 1, -1, 8, -8, 1]
    np.testing.assert_allclose(g[0], [1 / 4, 0, 0])
    np.testing.assert_allclose(g[1], [-1 / 6, -1 / 6, -1 / 6])
    np.testing.assert_allclose(g[4], [1 / 24, -1 / 12, 1 / 6])
    assert bt[0] == [4, 0, -5, 0, 1, 0] and bt[2] == [0, 4, -4, -1, 1, 0]


def test_equal_patches_have_equal_outputs():
    """Ties in pooling windows are broken as elsewhere: F(4, 3) drew lots for them."""
    rng = np.random.default_rng(0)
    # Strokes on a constant background, as after one step from a digit.
    x = np.full((16, 28, 28, 8), 0.1, np.float32) * rng.random(
        (16, 1, 1, 1), np.float32
    )
    strokes = rng.random((1, 28, 28, 8)) < 0.08
    x = np.where(strokes, rng.random(x.shape, np.float32), x)
    w = rng.normal(size=(3, 3, 16, 32)).astype(np.float32)
    assert winograd.applies(jnp.asarray(x), jnp.asarray(w), 1, False)
    out = jax.jit(lambda x, w: winograd.conv_winograd(x, w, False))(x, w)
    out = np.asarray(out)
    pairs = 0
    for down, right in ((1, 0), (0, 1), (1, 1)):
        same = (x[:, down:, right:] == x[:, : 28 - down, : 28 - right]).all(axis=0)
        windows = np.lib.stride_tricks.sliding_window_view(same, (3, 3), axis=(0, 1))
        equal = windows.all(axis=(-2, -1))
        found, beside = out[:, down:, right:], out[:, : 26 - down, : 26 - right]
        np.testing.assert_array_equal(found[:, equal], beside[:, equal])
        pairs += equal.sum()
    assert pairs > 1000


def test_winograd_loses_few_digits():
    keys = jax.random.split(jax.random.key(0), 2)
    x = jax.random.normal(keys[0], (64, 16, 16, 8))
    for size in (3, 5):
        w = jax.random.normal(keys[1], (size, size, 64, 32))
        with jax.enable_x64():
            x64, w64 = (jnp.asarray(a, jnp.float64) for a in (x, w))
            exact = np.asarray(jax.jit(convolution.conv_lax)(x64, w64))
        errors = [
            np.sqrt(np.mean((np.asarray(f(x, w)) - exact) ** 2) / np.mean(exact**2))
            for f in (jax.jit(winograd.conv_winograd), jax.jit(convolution.conv_slices))
        ]
        assert errors[0] < 8 * errors[1] and errors[0] < 2e-6, errors


def test_fast_convolution_in_bfloat16_rounds_no_more_than_lax():
    """Outputs and kernel gradients once, as lax (measured: 1.00 times its error).

    Gradients of inputs are sums of rounded ones, rounded once more: √2 times the error.
    Minimal filtering had 2.5 to 10 times; sums in bfloat16 1.9 to 3.7 times.
    """
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (64, 6, 6, 8), (3, 3, 64, 16), (16, 6, 6, 8)
    arrays = [jax.random.normal(*pair) for pair in zip(keys, shapes, strict=True)]
    arrays = [a.astype(jnp.bfloat16) for a in arrays]

    def run(form, dtype):
        x, w, grad = [a.astype(dtype) for a in arrays]
        out, back = jax.vjp(lambda x, w: form(x, w), x, w)
        return out, *back(grad)

    exact = jax.jit(lambda: run(convolution.conv_slices, jnp.float32))()
    found = jax.jit(lambda: run(convolution.conv_fast, jnp.bfloat16))()
    for a, b, most in zip(found, exact, (1.1, 1.6, 1.1), strict=True):
        once = jnp.linalg.norm((b.astype(jnp.bfloat16) - b).ravel())
        assert jnp.linalg.norm((a - b).ravel()) < most * once


def test_mnist_cnn_with_dropout():
    model = networks.from_flax(networks.MnistDropoutCNN())
    x = jax.random.normal(jax.random.key(0), (64, 28, 28, 1))
    variables = jax.jit(model.init)(jax.random.key(1), x)
    # PyTorch's default: U(−b, b), b² = 1/fan_in, kernels and biases alike.
    fans = {"Conv_0": 25, "Conv_1": 250, "Dense_0": 320, "Dense_1": 50}
    fans |= {"ChannelBias_0": 25, "ChannelBias_1": 250}
    for layer, fan in fans.items():
        for name, value in variables["params"][layer].items():
            most = np.abs(value).max()
            assert 0.5 < most * fan**0.5 <= 1, (layer, name)
    # Without training the network of the same weights without dropout.
    plain = networks.from_flax(networks.MnistCNN())
    predict = jax.jit(plain.predict)
    close(jax.jit(model.predict)(variables, x), predict(variables, x), 1e-5)
    # Hidden units are dropped: with all weights of the last layer
    # equal, the logit of a sample counts its hidden units.
    counting = jax.tree.map(jnp.zeros_like, variables)
    counting["params"]["Dense_0"]["bias"] = jnp.ones(50)
    counting["params"]["Dense_1"]["kernel"] = jnp.ones((50, 10))
    mask, train = jnp.ones(64, bool), jax.jit(model.train)
    logits, _ = train(counting, x, mask, jax.random.key(2))
    kept = np.asarray(logits)[:, 0] / 2  # survivors count twice
    assert (kept == np.round(kept)).all() and len(np.unique(kept)) > 5
    assert abs(kept.mean() - 25) < 3 * 3.54 / 8  # binomial, 64 samples


@pytest.mark.parametrize(
    ("name", "norm", "count"),
    [
        ("mnist_cnn", "none", 21_840),
        ("fashion_cnn", "none", 282_954),
        ("vgg11", "none", 9_225_610),
        ("resnet18", "group", 11_173_962),
        ("resnet18", "batch", 11_173_962),
    ],
)
def test_parameter_counts(name, norm, count):
    # ResNet-18 in CIFAR form has 11,173,962 weights in every published implementation.
    module = networks.make_model(ModelConfig(name, norm), 10, IMAGES[name])
    x = jax.ShapeDtypeStruct((1, *IMAGES[name]), jnp.float32)
    variables = jax.eval_shape(networks.from_flax(module).init, jax.random.key(0), x)
    assert sum(a.size for a in jax.tree.leaves(variables["params"])) == count
    assert ("batch_stats" in variables) == (norm == "batch")


def test_max_pool_and_group_norm_equal_flax():
    def last(function):
        return lambda x: function(x.transpose(3, 1, 2, 0)).transpose(3, 1, 2, 0)

    def flax_pool(x):
        return nn.max_pool(x, (2, 2), (2, 2), ((0, 1), (0, 1)))

    x = jax.random.normal(jax.random.key(0), (64, 5, 5, 4))
    # Ties: the gradient must go to one of them, the first, as in XLA's own pooling.
    x = x.at[0].set(1.0)
    # Compiled whole: operation by operation there are sixty programs.
    (ours, back), (theirs, flax_back) = (
        jax.jit(lambda x, pool=pool: jax.vjp(pool, x))(x)
        for pool in (pooling.max_pool, last(flax_pool))
    )
    np.testing.assert_array_equal(ours, theirs)
    grad = jax.random.normal(jax.random.key(1), ours.shape)
    np.testing.assert_array_equal(back(grad)[0], flax_back(grad)[0])
    params = {"scale": grad[:, 0, 0, 0], "bias": grad[:, 1, 1, 1]}
    flax_norm = nn.GroupNorm(num_groups=32, epsilon=1e-5).bind({"params": params})
    ours = networks.GroupNorm().apply({"params": params}, x)
    close(ours, last(flax_norm)(x), 1e-5)
