"""One GPU as plain data, and what may be assumed of it before anything is measured. Pure.

Assumed rates come from the negotiated link and from a table of names; they decide between cuts of a prompt,
and say of themselves that they are assumptions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from strata_coord.coordinator.rig import DeviceFacts, Rate, Rates

if TYPE_CHECKING:
    from strata_coord.ipc.assignment import ComputeDtype

__all__ = ["device_rates", "link_rate", "link_text", "takes_bf16"]

# GB/s of one lane in one direction, after line coding.
_LANE_GB_PER_S = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
# Share of it that large copies from pinned memory reach: 53.6 of 63.0 GB/s are assumed for PCIe 5 x16.
_LINK_SHARE = 0.85
# A card that does not tell its link is taken for PCIe 3 x16.
_UNKNOWN_LINK = (3, 16)


@dataclass(frozen=True, slots=True)
class _Card:
    """Vendor's figures: dense bf16 products summed in fp32 (fp16 where there is no bf16), and memory."""

    teraflops: float
    memory_gb_per_s: float


# The first name that is part of the card's name counts.
_CARDS: tuple[tuple[str, _Card], ...] = (
    ("B200", _Card(2250, 8000)),
    ("H200", _Card(989, 4800)),
    ("H100 PCIe", _Card(756, 2000)),
    ("H100", _Card(989, 3350)),
    ("A100", _Card(312, 1900)),
    ("L40S", _Card(362, 864)),
    ("RTX 6000 Ada", _Card(364, 960)),
    ("RTX A6000", _Card(155, 768)),
    ("RTX 5090", _Card(209, 1790)),
    ("RTX 4090", _Card(165, 1008)),
    ("RTX 4080", _Card(97, 717)),
    ("RTX 3090", _Card(71, 936)),
    ("RTX 3080", _Card(59, 760)),
    ("RTX 2080 Ti", _Card(54, 616)),
    ("Tesla T4", _Card(65, 320)),
)
_UNKNOWN_CARD = _Card(40, 400)
# Shares of the vendor's figures that a prompt's kernels are assumed to reach.
_FLOPS_SHARE = 0.5
_ATTENTION_SHARE = 0.3
_MEMORY_SHARE = 0.5
# fp32 products run without the matrix units.
_FP32_SHARE = 1 / 12
# Launches of one sub-chunk in one layer, which the device waits for where kernels are short.
_CALL_S = 3e-4


def link_rate(device: DeviceFacts) -> Rate:
    """Return the bytes per second from pinned host memory to the device.

    The generation is the one that card and slot can reach together, since an idle card lowers its link and
    raises it with the first copy; the width is the negotiated one, which does not change.
    """
    if device.link_bytes_per_s is not None:
        return device.link_bytes_per_s
    generation, width = _link(device)
    return Rate(value=_LANE_GB_PER_S[generation] * width * 1e9 * _LINK_SHARE, source="assumed")


def link_text(device: DeviceFacts) -> str:
    """Return the link in words."""
    rate = link_rate(device)
    generation, width = _link(device)
    return f"{rate.value / 1e9:.1f} GB/s {rate.source}, PCIe {generation} x{width}"


def device_rates(device: DeviceFacts, compute_dtype: ComputeDtype) -> Rates:
    """Return what the cost model divides by, for a stage on this device.

    drive_bytes_per_s is the host's and is replaced by the caller.
    """
    card = next((card for name, card in _CARDS if name in device.name), _UNKNOWN_CARD)
    flops = card.teraflops * 1e12 * (_FP32_SHARE if compute_dtype == "fp32" else 1.0)
    return Rates(
        copy_bytes_per_s=link_rate(device),
        drive_bytes_per_s=_assumed(1e9),
        expand_bytes_per_s=_assumed(card.memory_gb_per_s * 1e9 * _MEMORY_SHARE),
        flops_per_s=_assumed(flops * _FLOPS_SHARE),
        attention_flops_per_s=_assumed(flops * _ATTENTION_SHARE),
        call_s=_assumed(_CALL_S),
    )


def takes_bf16(device: DeviceFacts) -> bool:
    """Return whether the card multiplies bf16 natively: compute capability 8.0 and above."""
    return device.compute_capability >= (8, 0)


def _link(device: DeviceFacts) -> tuple[int, int]:
    generation = device.max_link_generation or device.link_generation
    width = device.link_width or device.max_link_width
    if generation not in _LANE_GB_PER_S or width < 1:
        return _UNKNOWN_LINK
    return generation, width


def _assumed(value: float) -> Rate:
    return Rate(value=value, source="assumed")
