"""Bytes and FLOP of HLO text, counted by hand."""

import pytest

from benchmarks import roofline

DEVICE = roofline.Device("test", bandwidth=1e3, flops=1e4)

PRODUCT = """\
HloModule jit_f, is_scheduled=true

%inside (p0: f32[100,8], p1: s32[], p2: f32[8,5]) -> f32[4,5] {
  %p1 = s32[] parameter(1)
  %p0 = f32[100,8]{1,0} parameter(0)
  %zero = s32[] constant(0)
  %part = f32[4,8]{1,0} dynamic-slice(%p0, %p1, %zero), dynamic_slice_sizes={4,8}
  %p2 = f32[8,5]{1,0} parameter(2)
  ROOT %dot = f32[4,5]{1,0} dot(%part, %p2), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%body (state: (s32[], f32[100,8], f32[8,5])) -> (s32[], f32[100,8], f32[8,5]) {
  %state = (s32[], f32[100,8]{1,0}, f32[8,5]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %a = f32[100,8]{1,0} get-tuple-element(%state), index=1
  %b = f32[8,5]{1,0} get-tuple-element(%state), index=2
  %f = f32[4,5]{1,0} fusion(%a, %i, %b), kind=kCustom, calls=%inside
  ROOT %next = (s32[], f32[100,8]{1,0}, f32[8,5]{1,0}) tuple(%i, %a, %b)
}

%condition (state.1: (s32[], f32[100,8], f32[8,5])) -> pred[] {
  %state.1 = (s32[], f32[100,8]{1,0}, f32[8,5]{1,0}) parameter(0)
  ROOT %less = pred[] constant(true)
}

ENTRY %main (x: f32[100,8], y: f32[8,5]) -> f32[8,5] {
  %x = f32[100,8]{1,0} parameter(0)
  %y = f32[8,5]{1,0} parameter(1)
  %start = s32[] constant(0)
  %begin = (s32[], f32[100,8]{1,0}, f32[8,5]{1,0}) tuple(%start, %x, %y)
  %loop = (s32[], f32[100,8]{1,0}, f32[8,5]{1,0}) while(%begin), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"7"},"x":1}
  ROOT %copy = f32[8,5]{1,0} copy(%y)
}
"""  # noqa: E501


def test_a_loop_counts_as_often_as_it_runs():
    found = roofline.cost(PRODUCT, DEVICE)
    # Of the 100 rows a step reads four: 4·8 floats, an index, 8·5 floats, 4·5 out.
    step, flop = 4 * (4 * 8 + 1 + 8 * 5 + 4 * 5), 2 * 4 * 5 * 8
    copy = 4 * 2 * 8 * 5
    assert found.bytes == 7 * step + copy
    assert found.flop == 7 * flop
    assert found.kernels == 8
    assert found.seconds == pytest.approx((7 * step + copy) / 1e3)
    # With slow arithmetic the product is bound by it.
    slow = roofline.cost(PRODUCT, DEVICE._replace(flops=1.0))
    assert slow.seconds == pytest.approx(7 * flop + copy / 1e3)


def test_the_kernels_of_a_step_are_those_of_its_loop():
    """Its one kernel; the copy after the loop is none of them."""
    (kernel,) = roofline.step(PRODUCT, DEVICE)
    assert kernel.product == "[4, 5], k = 8" and kernel.cost.flop == 2 * 4 * 5 * 8
    assert kernel.emitter == "fusion" and kernel.computes == "f"
    path = "jit(f)/while/body/closed_call/transpose(jvp(Net))/Dense_0/dot_general"
    marks = f', metadata={{op_name="{path}"}}, backend_config={{"kind":"__triton"}}'
    named = PRODUCT.replace("calls=%inside", "calls=%inside" + marks)
    (kernel,) = roofline.step(named, DEVICE)
    assert kernel.computes == "gradient of Net/Dense_0/dot_general"
    assert kernel.emitter == "Triton"
    assert roofline.by_name(named, DEVICE)["f"] == (kernel.computes, kernel.cost)


def test_a_product_of_six_has_a_sixth_of_the_peak_of_tensor_cores():
    text = PRODUCT.replace(
        "rhs_contracting_dims={0}",
        "rhs_contracting_dims={0}, algorithm=dot_bf16_bf16_f32_x6",
    )
    assert roofline.products(PRODUCT) == {"": 1}
    assert roofline.products(text) == {"bf16_bf16_f32_x6": 1}
    slow = DEVICE._replace(flops=1e-3, bfloat16=12.0)
    found = roofline.cost(text, slow)
    flop, copy = 2 * 4 * 5 * 8, 4 * 2 * 8 * 5
    assert found.flop == 7 * flop
    assert found.seconds == pytest.approx(7 * flop / 2 + copy / 1e3)
