"""Staleness, local work, DMS that fades, learned weights, sums in a finite field."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tsfl_jax
from tests import problems, reference
from tests.rules.test_rules import received
from tsfl_jax.rules import AGGREGATORS, averages, dms_rule, fednova, learned
from tsfl_jax.rules import secure_buffer as sb
from tsfl_jax.rules.base import ClientOutputs

# ---- Staleness ----

modest = settings(max_examples=60, deadline=None)
staleness_factor = jax.jit(averages.staleness_factor)
N = 5  # clients in the random tests: one size, one compilation


def slow_staleness(lag, kind, a, b):
    hp = {"staleness__kind": kind, "staleness__a": a, "staleness__b": b}
    return np.array([reference.staleness(float(x), hp) for x in lag])


lags = st.lists(st.integers(0, 400), min_size=N, max_size=N).map(np.array)


@modest
@given(lags, st.integers(0, 3), st.floats(0, 10), st.integers(0, 20))
def test_staleness_agrees_with_the_loop(lag, kind, a, b):
    expected = slow_staleness(lag, kind, float(np.float32(a)), b)
    found = staleness_factor(lag, kind, jnp.float32(a), b)
    np.testing.assert_allclose(found, expected, rtol=5e-5, atol=1e-30)
    assert found.dtype == jnp.float32
    order = np.argsort(lag)  # the later, the less; nothing counts more than 1
    assert np.all(np.diff(np.asarray(found)[order]) <= 0) and found.max() <= 1


def test_parameters_of_other_kinds_are_not_read():
    """NaN there reaches neither the value nor a gradient, with a vmapped kind."""
    lag = jnp.array([0, 2, 9])
    a = jnp.array([jnp.nan, 0.5, 0.5, jnp.nan])
    b = jnp.array([jnp.nan, jnp.nan, 2.0, jnp.nan])

    def factors(kind, a, b):
        value = averages.staleness_factor(lag, kind, a, b)
        return value, value

    slopes = jax.jit(jax.vmap(jax.jacobian(factors, (1, 2), has_aux=True)))
    (by_a, by_b), values = slopes(jnp.arange(4), a, b)
    for kind in range(4):
        expected = slow_staleness([0, 2, 9], kind, float(a[kind]), float(b[kind]))
        np.testing.assert_allclose(values[kind], expected, rtol=1e-6)
    np.testing.assert_allclose(by_a[1], -np.log([1, 3, 10]) * values[1], rtol=1e-6)
    # 1/(a(l − b) + 1) at 9: 1/4.5.
    np.testing.assert_allclose(by_a[2], [0, 0, -7 / 4.5**2], rtol=1e-6)
    np.testing.assert_allclose(by_b[2], [0, 0, 0.5 / 4.5**2], rtol=1e-6)
    assert not by_a[::3].any() and not by_b[jnp.array([0, 1, 3])].any()


def test_very_late_updates_keep_their_proportions():
    """(e/2)^−500 is 0 in float32, but (e/2)^−500 : (e/2)^−502 is not 0 : 0."""
    hp = problems.hparams(staleness__kind=averages.EXPONENTIAL)
    updates, lag = {"w": jnp.array([[1.0], [0.0], [9.0]])}, [500, 502, 3]
    given = {"tau": [1, 1, 0], "size": [1, 2, 1], "hparams": hp}
    rule, start = AGGREGATORS["fedavg"], {"w": jnp.zeros(1)}
    moved, _ = tsfl_jax.aggregate(rule, updates, start, lag=lag, **given)
    expected = 1 / (1 + 2 * (np.e / 2) ** -2)
    np.testing.assert_allclose(moved["w"], [expected], rtol=1e-5)


# ---- DMS that fades ----

TAU = [1, 3, 4, 4]


def faded(t, **changes):
    happened = received(TAU)
    info = happened.info._replace(interval=jnp.int32(t))
    hp = problems.hparams(coupling=0.02, **changes)
    return by_dms(info, hp)


by_dms = jax.jit(AGGREGATORS["dms"].mixing.weights)


def test_decays_by_hand():
    centered = np.array(TAU) - 3
    for kind, factor in ((0, 1.0), (1, np.exp(-6 / 4)), (2, 1 / (1 + 6 / 4))):
        found = faded(6, drop=0.0, decay=kind, decay_time=4.0)
        np.testing.assert_allclose(found.coupling, 0.02 * factor, rtol=1e-6)
        np.testing.assert_allclose(found.rho, 0.25 + 0.02 * factor * centered)
        start = faded(0, drop=0.0, decay=kind, decay_time=4.0)
        np.testing.assert_allclose(start.coupling, 0.02, rtol=1e-6)


def adapted(target, scale, t=0, present=None, coupling=0.1, **changes):
    """The adaptive rule where F_val = (ρ_0 − target)²."""
    happened = received(TAU)
    if present is not None:
        happened = happened._replace(present=jnp.array(present))

    hp = problems.hparams(coupling=coupling, drop=0.0, adapt=2.0, **changes)
    return _adapted(jnp.float32(target), jnp.float32(scale), happened, hp)


@jax.jit
def _adapted(target, scale, happened, hp):
    def objective(rho):
        away = rho[0] - target
        return away**2, jnp.zeros(4).at[0].set(2 * away)

    outputs = ClientOutputs(jnp.ones(4), objective)
    return dms_rule.adaptive_weights(outputs, scale, happened, hp)


def test_the_adaptive_factor_moves_to_the_smaller_loss_by_hand():
    """ρ_0 = ¼ − 0.1 s·2: with s = 1 it is 0.05, with ¼ 0.2, with 0.5 0.15."""
    found, scale = adapted(target=0.25, scale=0.5)
    assert scale == 0.25
    np.testing.assert_allclose(found.rho[0], 0.2, rtol=1e-6)
    np.testing.assert_allclose(found.coupling, 0.025, rtol=1e-6)
    found, scale = adapted(target=0.0, scale=0.5)
    assert scale == 1.0
    np.testing.assert_allclose(found.rho[0], 0.05, rtol=1e-5)
    # Never above the paper's, never below the least.
    assert adapted(target=0.0, scale=1.0)[1] == 1.0
    least = np.float32(dms_rule.LEAST)
    assert adapted(target=0.25, scale=least)[1] == least


def test_the_adaptive_factor_falls_where_a_large_c_makes_both_the_same():
    """c·s ≥ 5 gives all to the largest τ: s must not stay at 1, as DMS for good."""
    for scale in (1.0, 0.5):
        found, lower = adapted(target=0.25, scale=scale, coupling=20.0)
        np.testing.assert_allclose(found.rho, [0, 0, 0.5, 0.5], atol=1e-6)
        assert lower == scale / 2
    # With other weights F_val decides.
    assert adapted(target=0.25, scale=2.0**-8, coupling=20.0)[1] == 2.0**-9
    assert adapted(target=0.0, scale=2.0**-8, coupling=20.0)[1] == 2.0**-7


def test_the_adaptive_factor_stays_where_no_s_makes_a_difference():
    """One client alone has all the weight, whatever s is; or no loss is finite."""
    alone = [True, False, False, False]
    assert adapted(target=0.0, scale=0.5, present=alone)[1] == 0.5
    assert adapted(target=np.nan, scale=0.25)[1] == 0.25


def test_lost_models_give_their_weight_to_the_others():
    found, _ = adapted(target=0.25, scale=1e-3, present=[True, True, False, True])
    np.testing.assert_allclose(found.rho, [1 / 3, 1 / 3, 0, 1 / 3], atol=1e-3)
    found, _ = adapted(target=0.25, scale=1.0, present=[False] * 4)
    np.testing.assert_array_equal(found.rho, np.zeros(4))


# ---- Learned weights ----

HAPPENED = received([1, 0, 4, 2], [10, 99, 20, 30], lag=[0, 0, 3, 1])
LOSS = jnp.array([2.0, jnp.nan, 1.0, 3.0])


def test_features_by_hand():
    """max τ = 4, mean |D| = 20, mean loss = 2, one quarter of the run is over."""
    info = HAPPENED.info._replace(interval=jnp.int32(5))
    features = jax.jit(learned.features)
    found = features(info, LOSS, HAPPENED.present, jnp.float32(20.0))
    log = np.log
    want = [
        [0.25, 0.75 * 0.25, log(0.5), 0.0, 0.0],
        [0.0] * 5,
        [1.0, 0.75, 0.0, 0.75, log(0.5)],
        [0.5, 0.75 * 0.5, log(1.5), 0.5, log(1.5)],
    ]
    np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-7)


def test_features_have_no_unit():
    scaled = received([3, 0, 12, 6], [70, 693, 140, 210], lag=[0, 0, 3, 1])
    pairs = ((HAPPENED, LOSS), (scaled, 9 * LOSS))
    one, other = (learned.features(e.info, loss, e.present, 1.0) for e, loss in pairs)
    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def learned_rho(happened=HAPPENED, losses=LOSS, **theta):
    plain = {f"learned__{name}": 0.0 for name in learned.FEATURES}
    hp = problems.hparams(**plain | {f"learned__{n}": v for n, v in theta.items()})
    found, state = learned.learned_weights(
        ClientOutputs(losses, None), (), happened, hp
    )
    assert state == ()
    return found.rho


def test_limits():
    np.testing.assert_allclose(learned_rho(), [1 / 3, 0, 1 / 3, 1 / 3], rtol=1e-6)
    np.testing.assert_allclose(
        learned_rho(size=1.0), [1 / 6, 0, 1 / 3, 1 / 2], rtol=1e-5
    )
    far = learned_rho(tau=200.0)
    np.testing.assert_allclose(far, [0, 0, 1, 0], atol=1e-6)
    ratio = learned_rho(loss=2.0)
    np.testing.assert_allclose(ratio[3] / ratio[2], 9.0, rtol=1e-4)


def test_unknown_losses_and_nobody_present():
    missing = jnp.full(4, jnp.nan)
    np.testing.assert_allclose(
        learned_rho(losses=missing, tau=1.0), learned_rho(tau=1.0), rtol=1e-6
    )
    np.testing.assert_allclose(learned_rho(losses=0 * LOSS).sum(), 1, rtol=1e-6)
    away = received([0, 0, 0, 0])
    np.testing.assert_array_equal(learned_rho(away), np.zeros(4))


# ---- Sums in a finite field ----

secure_sum = jax.jit(sb.secure_sum)
RESIDUES = st.integers(0, sb.PRIME - 1)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(RESIDUES, st.integers(0, 1024)), min_size=1, max_size=6))
def test_sums_modulo_p_are_those_of_big_integers(terms):
    total = jnp.zeros((), jnp.uint32)
    for k, count in terms:
        total = sb.add(total, sb.times(jnp.int32(count), jnp.uint32(k)))
    assert int(total) == sum(k * count for k, count in terms) % sb.PRIME


@settings(deadline=None)
@given(st.integers(-(2**31) + 128, 2**31 - 128))
def test_the_field_holds_negative_numbers(k):
    assert int(sb.to_field(jnp.int32(k))) == k % sb.PRIME
    assert float(sb.from_field(sb.to_field(jnp.int32(k)))) == np.float32(k)


def test_rounding_goes_to_a_neighbor_and_is_right_in_the_mean():
    x = jnp.array([0.3, -0.3, 2.0, -1.75])
    keys = jax.random.split(jax.random.key(0), 20_000)
    drawn = np.asarray(jax.vmap(lambda key: sb.rounded(x, 2, key))(keys))
    assert (np.abs(drawn - 2 * np.asarray(x)) < 1).all()
    np.testing.assert_allclose(drawn.mean(axis=0), 2 * x, atol=0.02)
    assert (drawn[:, 2] == 4).all()


@pytest.mark.parametrize("levels", [2**8, 2**16])
def test_the_sum_is_the_mean_update_but_for_the_rounding(levels):
    rng = np.random.default_rng(0)
    happened = received([2, 1, 3, 0], lag=[0, 3, 8, 0])
    hp = problems.hparams(
        secure_buffer__levels=levels,
        secure_buffer__weight_levels=64,
        staleness__kind=1,
        staleness__a=0.5,
    )
    u = rng.normal(size=(4, 50)).astype(np.float32)
    u[3] = np.nan  # absent
    found, _ = secure_sum({"w": jnp.asarray(u)}, (), happened, hp)
    rho = np.asarray(sb.secure_weights(happened.info, hp).rho, np.float64)
    assert rho[3] == 0 and rho.sum() == pytest.approx(1)
    # s = 1, 1/2, 1/3 in steps of 1/64: the last is rounded to 21 or 22 of them.
    assert rho[0] / rho[1] == pytest.approx(2)
    assert rho[0] / rho[2] in (pytest.approx(64 / 21), pytest.approx(64 / 22))
    error = np.asarray(found["w"]) - rho[:3] @ u[:3].astype(np.float64)
    assert 0 < np.abs(error).max() < 1 / levels


def test_a_sum_beyond_half_of_p_wraps_around():
    happened = received([1, 1])
    hp = problems.hparams(secure_buffer__levels=2**16, secure_buffer__weight_levels=64)
    fits = {"w": jnp.array([[200.0], [200.0]])}
    wraps = {"w": jnp.array([[300.0], [300.0]])}
    assert float(secure_sum(fits, (), happened, hp)[0]["w"][0]) == 200
    expected = (600 * 2**22 - sb.PRIME) / (2 * 2**22)
    found = float(secure_sum(wraps, (), happened, hp)[0]["w"][0])
    assert found == pytest.approx(expected, rel=1e-6)


# ---- Local work ----

accumulation = jax.jit(fednova.accumulation)


@jax.jit
def nova_weights(share, steps, momentum):
    return fednova.nova_weights(share, accumulation(steps, momentum))


@pytest.mark.parametrize("momentum", [0.0, 0.9, 0.9999])
def test_accumulation_is_fine_in_float32(momentum):
    """Against the closed form in rational arithmetic, at the float32 momentum."""
    steps = [0, 1, 2, 3, 10, 99, 1000, 10_000]
    found = accumulation(jnp.array(steps), momentum)
    assert found.dtype == jnp.float32
    for s, a in zip(steps, found, strict=True):
        m = Fraction(float(np.float32(momentum)))
        exact = (s - m * (1 - m**s) / (1 - m)) / (1 - m)
        np.testing.assert_allclose(float(a), float(exact), rtol=1e-6)


def test_accumulation_has_a_slope_in_the_momentum():
    """a_3 = 3 + 2m + m²: slope 2 + 2m, 2 at m = 0; nothing for 0 and 1 steps."""
    slope = jax.jit(jax.jacobian(fednova.accumulation, argnums=1))
    np.testing.assert_array_equal(slope(jnp.array([0, 1, 3]), 0.5), [0, 0, 3])
    np.testing.assert_array_equal(slope(jnp.array([0, 1, 3]), 0.0), [0, 0, 2])
    assert np.isfinite(slope(jnp.array([10_000]), 0.99)).all()


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("alpha", [1e-6, 0.003, 0.9])
def test_accumulation_with_a_proximal_term_agrees_with_the_loop(momentum, alpha):
    steps = [0, 1, 2, 3, 7, 50, 333, 4000]
    m, a = float(np.float32(momentum)), float(np.float32(alpha))
    expected = [reference.times_counted(s, m, a) for s in steps]
    assert expected[-1] < 0.999 * reference.times_counted(4000, m)
    found = accumulation(jnp.array(steps), momentum, alpha)
    np.testing.assert_allclose(found, expected, rtol=5e-5)


def test_nova_weights_remove_the_objective_inconsistency():
    """Every step of every client has the weight τ_eff·p_i: ρ_i‖a_i‖₁ ∝ p_i."""
    share, steps = jnp.array([0.1, 0.3, 0.6]), jnp.array([50, 2, 7])
    moved = nova_weights(share, steps, 0.9) * accumulation(steps, 0.9)
    np.testing.assert_allclose(moved / moved.sum(), share, rtol=1e-6)


def test_no_client_worked():
    def total(share, momentum):
        return nova_weights(share, jnp.zeros(3, int), momentum).sum()

    value, slopes = jax.value_and_grad(total, (0, 1))(jnp.zeros(3), 0.9)
    assert value == 0
    assert all(np.isfinite(x).all() for x in slopes)
