"""XLA's thunk sequence of a GPU program, read and counted by hand."""

from benchmarks import thunks

CAPTURED = """\
000: kCommandBuffer [source       | next=169 (1)]
    001: kCopy         [source        | next=037 (36)] kCopy
    002: kCustomKernel [source        | next=037 (35)] loop_multiply_fusion_6 grid: [1]
    003: kWhile        [prev=002 (1)  | next=084 (1) ]
condition:
        004: kCustomKernel [source | sink] loop_compare_fusion_1 grid: [1, 1, 1]
      body:
        005: kCustomKernel [source | next=006 (1)] loop_multiply_fusion grid: [1]
        006: kCustomKernel [prev=005 | sink] gemm_fusion_dot_general_45 grid: [1]
    007: kCustomKernel [prev=003 (1)  | sink] input_scatter_fusion grid: [1, 1, 1]
008: kConditional   [prev=000 (1) | next=000 (1)]
  false_branch:
    000: kCommandBuffer [source       | next=143 (1)]
        009: kCopy         [source       | sink        ] kCopy
    010: kWhile         [prev=000 (1) | sink]
condition:
        011: kCustomKernel [source | sink] loop_compare_fusion grid: [1, 1, 1]
      body:
        000: kCommandBuffer [source | sink]
            012: kCustomKernel       [source | sink] input_transpose_fusion_1
            013: kDynamicSliceFusion [source | sink] params=1, results=1
                014: kCopy [source | sink] kCopy
  true_branch:
    015: kCopy [source       | next=168 (1)] kCopy
000: kCommandBuffer [prev=008 (1) | sink        ]
    016: kCopy [source | sink] kCopy
"""


def test_a_captured_loop_needs_no_launch():
    expected = {
        "launches": 2,  # two command buffers
        "step_launches": 0,
        "step_kernels": 3,  # the condition's and the body's
        "buffers": 2,
        "loop_buffers": 1,
        "captured": 7,
        "kernels": 7,
        "conditionals": 1,
        "host_loops": 0,
    }
    assert thunks.structure(thunks.read(CAPTURED))._asdict() == expected
