"""The gated feed-forward of a group of experts over the rows routed to them, as two grouped products.

(row, choice) pairs of a super-chunk are sorted by expert. A call multiplies the pairs of G neighbouring
experts: those at sorted positions offsets[0] .. offsets[G] - 1, past skip_rows of them, at most as many as
the scratch has rows. Bounds are read on the device; the host knows only the capacity.

Letters: S rows of the super-chunk, P pairs, n rows of the scratch, D hidden size, F expert width, G experts.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from strata_coord.kernels.triton_launch import power_of_two, shared_memory_bytes

Method = Literal["torch", "grouped_mm", "triton"]

_ALIGNED = 8  # elements: grouped_mm wants row strides that are multiples of 16 bytes
_HOPPER = (9, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedScratch:
    """What one call writes to. Rows past the group's own are left undefined."""

    y_nD: Tensor
    hidden_nF: Tensor
    x_nD: Tensor | None  # gathered rows; grouped_mm only
    ends_G: Tensor | None  # int32; grouped_mm only
    num_groups: int  # experts that a call may have


def grouped_method(device: torch.device, dtype: torch.dtype, hidden: int, width: int) -> tuple[Method, str]:
    """Return which code runs the products on a device, and why."""
    if device.type != "cuda":
        return "torch", f"device {device.type}: a loop over experts"
    capability = torch.cuda.get_device_capability(device)
    name = f"compute capability {capability[0]}.{capability[1]}"
    if capability != _HOPPER:
        return "triton", f"{name}: torch's grouped_mm is not native there"
    if dtype != torch.bfloat16:
        return "triton", f"torch's grouped_mm takes bfloat16, not {dtype}"
    if hidden % _ALIGNED or width % _ALIGNED:
        return "triton", f"sizes {hidden} and {width} are not both multiples of {_ALIGNED}"
    return "grouped_mm", f"{name}: torch's grouped_mm is native"


def make_grouped_scratch(
    num_rows: int,
    gate_up_GFD: Tensor,
    *,
    method: Method,
    out_dtype: torch.dtype | None = None,
) -> GroupedScratch:
    """Take scratch of num_rows rows, of the weights' dtype; out_dtype: that of y.

    grouped_mm has no out argument: besides this scratch it takes num_rows * 2F and num_rows * D elements from
    torch's allocator for the length of a call.
    """
    groups, width, hidden = gate_up_GFD.shape[0], gate_up_GFD.shape[1] // 2, gate_up_GFD.shape[2]

    def empty(columns: int, dtype: torch.dtype) -> Tensor:
        return gate_up_GFD.new_empty((num_rows, columns), dtype=dtype)

    dtype = gate_up_GFD.dtype
    takes_gathered = method == "grouped_mm"
    return GroupedScratch(
        y_nD=empty(hidden, out_dtype or dtype),
        hidden_nF=empty(width, dtype),
        x_nD=empty(hidden, dtype) if takes_gathered else None,
        ends_G=gate_up_GFD.new_empty((groups,), dtype=torch.int32) if takes_gathered else None,
        num_groups=groups,
    )


def grouped_swiglu(
    x_SD: Tensor,
    tokens_P: Tensor,
    offsets_G1: Tensor,
    gate_up_GFD: Tensor,
    down_GDF: Tensor,
    *,
    scratch: GroupedScratch,
    method: Method,
    skip_rows: int = 0,
) -> Tensor:
    """Return y [n, D]: row i is down(silu(gate x) * up x) of the pair at position offsets[0] + skip_rows + i.

    Sums are fp32 and hidden values are rounded to the weights' dtype. Runs on the current stream and never
    waits for the device. Compared with method "torch" within 1e-2 (bf16).

    Args:
        x_SD: Rows, any row stride, of the weights' dtype.
        tokens_P: int32 or int64: the row of each pair, pairs sorted by expert.
        offsets_G1: int32: sorted position where each expert of the group begins, then where the last ends.
        gate_up_GFD: [G, 2F, D], gate rows first.
        down_GDF: [G, D, F].
        scratch: From make_grouped_scratch of the same method.
        method: From grouped_method.
        skip_rows: How many of the group's rows earlier calls have multiplied.

    Raises:
        ValueError: shapes or dtypes do not fit each other.
    """
    groups, hidden, width = down_GDF.shape
    if gate_up_GFD.shape != (groups, 2 * width, hidden) or offsets_G1.shape != (groups + 1,):
        message = (
            f"gate and up {list(gate_up_GFD.shape)} and offsets {list(offsets_G1.shape)} do not fit "
            f"down {list(down_GDF.shape)}"
        )
        raise ValueError(message)
    if (
        x_SD.shape[1] != hidden
        or x_SD.stride(1) != 1
        or not x_SD.dtype == gate_up_GFD.dtype == down_GDF.dtype
    ):
        message = f"rows {list(x_SD.shape)} of {x_SD.dtype} for weights of {hidden} and {gate_up_GFD.dtype}"
        raise ValueError(message)
    if not (gate_up_GFD.is_contiguous() and down_GDF.is_contiguous()) or offsets_G1.dtype != torch.int32:
        message = f"weights must be contiguous and offsets int32, got {offsets_G1.dtype}"
        raise ValueError(message)
    if scratch.y_nD.shape[0] == 0 or tokens_P.numel() == 0:
        return scratch.y_nD
    operands = (x_SD, tokens_P, offsets_G1, gate_up_GFD, down_GDF)
    if method == "torch":
        return _by_loop(*operands, scratch, skip_rows)
    if method == "grouped_mm":
        return _by_grouped_mm(*operands, scratch, skip_rows)
    return _by_triton(*operands, scratch, skip_rows)


def _by_loop(
    x_SD: Tensor,
    tokens_P: Tensor,
    offsets_G1: Tensor,
    gate_up_GFD: Tensor,
    down_GDF: Tensor,
    scratch: GroupedScratch,
    skip_rows: int,
) -> Tensor:
    """The reference: reads the offsets, and sums in the weights' dtype as torch's matmul does."""
    offsets = offsets_G1.tolist()
    base, capacity = offsets[0] + skip_rows, scratch.y_nD.shape[0]
    for expert, (first, last) in enumerate(pairwise(offsets)):
        begin, end = max(first, base), min(last, base + capacity)
        if begin >= end:
            continue
        both = functional.linear(x_SD[tokens_P[begin:end].long()], gate_up_GFD[expert]).float()
        gate, up = both.chunk(2, dim=1)
        here = slice(begin - base, end - base)
        scratch.hidden_nF[here] = functional.silu(gate) * up
        scratch.y_nD[here] = functional.linear(scratch.hidden_nF[here], down_GDF[expert])
    return scratch.y_nD


def _by_grouped_mm(
    x_SD: Tensor,
    tokens_P: Tensor,
    offsets_G1: Tensor,
    gate_up_GFD: Tensor,
    down_GDF: Tensor,
    scratch: GroupedScratch,
    skip_rows: int,
) -> Tensor:
    from strata_coord.kernels.triton_src import rows

    if scratch.x_nD is None or scratch.ends_G is None:
        message = "grouped_mm needs scratch for gathered rows and ends, got that of another method"
        raise ValueError(message)
    groups, hidden, width = down_GDF.shape
    capacity = scratch.y_nD.shape[0]
    block = min(power_of_two(hidden), 2048)
    rows.gather_rows_kernel[(capacity, -(-hidden // block))](
        x_SD,
        tokens_P,
        offsets_G1,
        scratch.x_nD,
        skip_rows,
        capacity,
        groups,
        hidden,
        x_SD.stride(0),
        BLOCK=block,
    )
    ends_G = scratch.ends_G[:groups]
    torch.sub(offsets_G1[1:], offsets_G1[:1], out=ends_G)
    ends_G.sub_(skip_rows).clamp_(0, capacity)
    both = functional.grouped_mm(scratch.x_nD, gate_up_GFD.transpose(1, 2), offs=ends_G)
    block = min(power_of_two(width), 1024)
    rows.swiglu_rows_kernel[(capacity, -(-width // block))](
        both, scratch.hidden_nF, offsets_G1, skip_rows, capacity, groups, width, BOUNDED=True, BLOCK=block
    )
    y = functional.grouped_mm(scratch.hidden_nF, down_GDF.transpose(1, 2), offs=ends_G)
    return y if y.dtype == scratch.y_nD.dtype else scratch.y_nD.copy_(y)


def _by_triton(
    x_SD: Tensor,
    tokens_P: Tensor,
    offsets_G1: Tensor,
    gate_up_GFD: Tensor,
    down_GDF: Tensor,
    scratch: GroupedScratch,
    skip_rows: int,
) -> Tensor:
    from strata_coord.kernels.triton_src import grouped_gemm

    groups, hidden, width = down_GDF.shape
    capacity = scratch.y_nD.shape[0]
    tile = _tile_sizes(x_SD, capacity // groups)
    row_tiles = -(-capacity // tile.rows) + groups

    def grid(columns: int) -> tuple[int]:
        return (min(tile.programs, row_tiles * -(-columns // tile.columns)),)

    sizes = {"BM": tile.rows, "BN": tile.columns, "BK": tile.inner, "GP": power_of_two(groups)}
    sizes |= {"D": hidden, "F": width}
    launch = {"num_warps": tile.warps, "num_stages": tile.stages}
    grouped_gemm.gate_up_kernel[grid(width)](
        x_SD,
        tokens_P,
        offsets_G1,
        gate_up_GFD,
        scratch.hidden_nF,
        skip_rows,
        capacity,
        groups,
        x_SD.stride(0),
        **sizes,
        **launch,
    )
    grouped_gemm.down_kernel[grid(hidden)](
        scratch.hidden_nF,
        offsets_G1,
        down_GDF,
        scratch.y_nD,
        skip_rows,
        capacity,
        groups,
        **sizes,
        **launch,
    )
    return scratch.y_nD


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tile:
    rows: int
    columns: int
    inner: int
    warps: int
    stages: int
    programs: int


def _tile_sizes(x_SD: Tensor, rows_per_expert: int) -> _Tile:
    """Tile sizes by the rows that an expert has on average and by the shared memory of the card."""
    if x_SD.device.type != "cuda":
        return _Tile(rows=16, columns=16, inner=32, warps=4, stages=1, programs=3)
    card = torch.cuda.get_device_properties(x_SD.device)
    rows = min(max(power_of_two(rows_per_expert), 16), 128)
    # The tiles of x, gate and up of each stage lie in shared memory; where products do not read them from
    # there (all but Hopper), the last stage needs none.
    shared = shared_memory_bytes(x_SD.device)
    inner = 64 if shared >= 96 << 10 and x_SD.element_size() == 2 else 32
    per_stage = (rows + 2 * 128) * inner * x_SD.element_size()
    stages = max(1, min(4, shared // per_stage + (card.major != _HOPPER[0])))
    return _Tile(
        rows=rows,
        columns=128,
        inner=inner,
        warps=8 if rows >= 64 else 4,
        stages=stages,
        programs=card.multi_processor_count,
    )
