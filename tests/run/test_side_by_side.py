"""Small networks on one CPU device: clients side by side by choice."""

import jax
import pytest

from tests.problems import small
from tsfl_jax.engine import optimizers
from tsfl_jax.prepare import prepare
from tsfl_jax.run import lanes

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="of a CPU")


def even(tau=(2,), **changes):
    schedule = {"schedule__kind": "explicit", "schedule__tau": tau}
    return small(**{"algorithm": "fedavg"} | schedule | changes)


def mapping(config):
    return prepare.prepare(config).mapping


def test_the_work_decides():
    found = prepare.prepare(even())
    assert found.mapping == "vmap"
    assert any("side by side" in note for note in found.notes)
    notes = prepare.prepare(even(devices=2)).notes  # what else could be faster
    assert any("one after another" in n and "mapping=vmap" in n for n in notes)
    images = {"data__name": "synthetic", "data__train_size": 256}
    for other in (
        even((1, 2, 2, 1), hidden=64),  # frozen steps would cost more than the loop
        even(devices=2),  # bits would depend on the number of devices
        even(devices=0),  # and here on the machine
        even(mapping="sequential"),
        small(),
        even(hidden=2000),  # a step is enough work
        even((1, 1, 1, 8)),
        even(num_intervals=1, model__name="mnist_cnn", **images),  # own kernels
    ):
        assert mapping(other) == "sequential"
    # Steps so small that frozen ones cost less than loops, if they are not most.
    assert mapping(even(tau=(1, 2, 2, 1))) == "vmap"


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("clip_norm", {"clip_norm": 1.0}),
        ("momentum", {"momentum": 0.0}),
        ("mu", {"algorithm": "fedprox"}),
    ],
)
def test_terms_that_a_step_has_and_those_that_it_has_not_are_two_programs(
    name, settings
):
    """Each lane has the bits of a single run: a term of 0 would still change some."""
    several = [prepare.prepare(even(**s)) for s in ({}, settings)]
    assert len(lanes.group(several)) == 2
    terms = [optimizers.terms_of(p.hparams)._asdict() for p in several]
    assert {n for n in terms[0] if terms[0][n] != terms[1][n]} == {name}
