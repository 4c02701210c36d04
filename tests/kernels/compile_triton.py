"""Compiles every Triton kernel for one architecture, given as an argument, without a device.

A process of its own: where kernels are interpreted they cannot be compiled.
"""

import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from strata_coord.kernels.triton_src import delta, grouped_gemm, merge, norms, routing, rows, sparse, streams

INT_POINTERS = {"tokens", "offsets", "position", "ids", "words", "counts"}
FP32_POINTERS = {
    "total",
    "history",
    "state",
    "scores",
    "g",
    "beta",
    "cos",
    "sin",
    "write",
    "next_write",
    "logits",
}
FP32_POINTERS |= {"lse_one", "lse_two"}
POINTERS = {
    "x",
    "y",
    "q",
    "k",
    "v",
    "keys",
    "out",
    "weights",
    "weight",
    "gate",
    "up",
    "hidden",
    "gate_up",
    "low",
}
POINTERS |= {"gamma", "inject", "normed", "one", "two", "bias", "selection_bias"}
FLOATS = {"eps", "scale"}

# Sizes of Flash-Next: 2560 wide, 24 heads of 256, 640 experts' width, 4 streams, 48 value heads of 128.
CASES: list[tuple[Any, dict[str, object], int, int]] = [
    (grouped_gemm.gate_up_kernel, {"D": 2560, "F": 640, "GP": 64, "BM": 128, "BN": 128, "BK": 32}, 8, 2),
    (grouped_gemm.down_kernel, {"D": 2560, "F": 640, "GP": 64, "BM": 16, "BN": 128, "BK": 32}, 4, 2),
    (rows.gather_rows_kernel, {"BLOCK": 2048}, 4, 2),
    (rows.swiglu_rows_kernel, {"BOUNDED": True, "BLOCK": 1024}, 4, 2),
    (rows.add_in_order_kernel, {"BOUNDED": True, "KP": 16, "BLOCK": 2048}, 4, 2),
    (rows.add_in_order_kernel, {"BOUNDED": False, "KP": 16, "BLOCK": 2048}, 4, 2),
    (norms.rms_norm_kernel, {"D": 128, "GATE": 1, "ROWS": 32, "BLOCK": 128}, 4, 2),
    (
        norms.norm_rotate_kernel,
        {"D": 256, "R": 32, "NORM": True, "NEIGHBOURS": False, "ROWS": 8, "RP": 32, "REST": 256},
        4,
        2,
    ),
    (norms.sigmoid_gate_kernel, {"ROWS": 4, "BLOCK": 256}, 4, 2),
    (
        streams.stream_kernel,
        {"D": 2560, "N": 4, "WRITE": True, "NORM": True, "INJECT": True, "BLOCK": 4096},
        8,
        2,
    ),
    (streams.scaled_silu_kernel, {"BLOCK": 1024}, 4, 2),
    (streams.mix_streams_kernel, {"N": 4, "BLOCK": 1024}, 4, 2),
    (
        routing.route_kernel,
        {"E": 512, "K": 10, "EP": 512, "KP": 16, "BIAS": True, "SELECTION_BIAS": True, "SIGMOID": False}
        | {"RENORMALISED": True},
        2,
        2,
    ),
    (delta.causal_conv_kernel, {"DILATION": 1, "TAPS": 4, "BT": 16, "BC": 128}, 4, 2),
    (delta.advance_history_kernel, {"LENGTH": 3, "BC": 128}, 4, 2),
    (
        delta.recurrent_delta_kernel,
        {"H": 48, "GROUPS": 16, "K": 128, "V": 128, "TILED": True, "KP": 128, "BV": 32},
        4,
        2,
    ),
    (sparse.block_scores_kernel, {"H": 4, "DIM": 128, "R": 4, "IP": 128, "BT": 64, "BM": 64}, 4, 2),
    (sparse.select_blocks_kernel, {"NUM_SELECTED": 512, "R": 4, "TQ": 4, "BLOCK": 8192}, 8, 2),
    (
        sparse.attend_blocks_kernel,
        {"HEADS": 24, "HG": 12, "HP": 16, "D": 256, "DP": 256, "R": 4, "TQ": 4, "BK": 32},
        4,
        2,
    ),
    (merge.merge_parts_kernel, {"D": 128, "ROWS": 16, "BLOCK": 128}, 4, 2),
]


def type_of(name: str) -> str:
    """The Triton type of a kernel's argument."""
    if name in INT_POINTERS:
        return "*i32"
    if name in FP32_POINTERS:
        return "*fp32"
    if name in POINTERS:
        return "*bf16"
    return "fp32" if name in FLOATS else "i32"


def compile_kernel(
    kernel: Any, constants: dict[str, object], warps: int, stages: int, capability: int
) -> int:
    """Return the bytes of shared memory that the compiled kernel takes."""
    names = [parameter.name for parameter in kernel.params]
    signature = {
        name: "constexpr" if name in constants else "*fp32" if name == "rows" else type_of(name)
        for name in names
    }
    aligned = [i for i, name in enumerate(names) if signature[name].startswith("*") or "stride" in name]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in aligned if names[i] not in constants},
    )
    options = {"num_warps": warps, "num_stages": stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return int(compiled.metadata.shared)


def main() -> None:
    """Compile all for the architecture named on the command line, as in 90."""
    for kernel, constants, warps, stages in CASES:
        shared = compile_kernel(kernel, constants, warps, stages, int(sys.argv[1]))
        print(kernel.fn.__name__, shared)


if __name__ == "__main__":
    main()
