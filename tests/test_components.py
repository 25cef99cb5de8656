"""Components: settings as arrays of a program, by hand."""

import chex
import jax
import numpy as np

from tsfl_jax import components
from tsfl_jax.components import component, setting
from tsfl_jax.rules.averages import KINDS, Staleness


@component("shape")
class Shape:
    """A component with a setting of each kind."""

    scale: float = setting(2.0, "a number")
    form: str = setting("flat", "a choice", ("round", "flat"))
    sides: int = setting(3, "an integer that shapes the program", static=True)


def test_choices_are_indices_and_numbers_float32():
    found = components.arrays(Shape(scale=0.5))
    chex.assert_trees_all_equal(
        jax.tree.leaves(found), [np.float32(0.5), np.int32(1)], strict=True
    )
    assert found.sides == 3
    for place, kind in enumerate(KINDS):
        assert components.arrays(Staleness(kind=kind)).kind == place


def test_static_fields_alone_make_another_program():
    def compiled(*several):
        count = chex.assert_max_traces(lambda own: own.scale * own.sides, n=2)
        run = jax.jit(count)
        return [float(run(components.arrays(own))) for own in several]

    # Two traces for three values: a second number of sides is another program.
    several = Shape(scale=1.0), Shape(scale=2.0, form="round"), Shape(sides=4)
    assert compiled(*several) == [3.0, 6.0, 8.0]
    chex.clear_trace_counter()
