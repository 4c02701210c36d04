"""From the rope.scaling.* keys to YaRN's numbers. Any other scaling is refused by name.

The default magnitude, 0.1 ln(factor) + 1, is what the models' own code takes where their configuration does
not say otherwise.
"""

import math

from strata_coord.coordinator.gguf_metadata import Metadata
from strata_coord.ipc.assignment import YarnGeometry

_MAX_CONTEXT = 1 << 30
_MAX_FACTOR = 1e6
_DEFAULT_BETA_FAST = 32.0
_DEFAULT_BETA_SLOW = 1.0


def read_yarn(metadata: Metadata, prefix: str) -> YarnGeometry | None:
    """Return the scaling of an architecture's rotations, None without one.

    Args:
        metadata: The file's keys.
        prefix: The architecture's name and a dot.

    Raises:
        ModelError: The scaling is neither "none" nor "yarn", or a number is missing or out of range.
    """
    scaling = f"{prefix}rope.scaling."
    kind = metadata.text(f"{scaling}type", default="none")
    if kind == "none":
        return None
    if kind != "yarn":
        metadata.refuse(f"{scaling}type", f'"{kind}" is not supported; supported are "none" and "yarn"')

    def number(key: str, *, default: float | None, low: float, high: float = _MAX_FACTOR) -> float:
        return metadata.number(scaling + key, low=low, high=high, default=default)

    # -1 is a converter's way to write "not set"; 0 would be plain interpolation, which is another scaling.
    mixed = number("yarn_ext_factor", default=1.0, low=-1.0)
    if mixed not in (1.0, -1.0):
        metadata.refuse(f"{scaling}yarn_ext_factor", f"{mixed} is not supported; supported is 1")
    logged = number("yarn_log_multiplier", default=0.0, low=-_MAX_FACTOR)
    if logged:
        metadata.refuse(f"{scaling}yarn_log_multiplier", f"{logged} is not supported; supported is 0")
    factor = number("factor", default=None, low=1.0)
    beta_fast = number("yarn_beta_fast", default=_DEFAULT_BETA_FAST, low=0.0) or _DEFAULT_BETA_FAST
    beta_slow = number("yarn_beta_slow", default=_DEFAULT_BETA_SLOW, low=0.0) or _DEFAULT_BETA_SLOW
    if beta_slow > beta_fast:
        metadata.refuse(f"{scaling}yarn_beta_slow", f"{beta_slow}, above yarn_beta_fast {beta_fast}")
    magnitude = number("yarn_attn_factor", default=0.1 * math.log(factor) + 1.0, low=1e-6)
    return YarnGeometry(
        factor=factor,
        original_tokens=metadata.integer(f"{scaling}original_context_length", low=1, high=_MAX_CONTEXT),
        beta_fast=beta_fast,
        beta_slow=beta_slow,
        magnitude=magnitude * number("attn_factor", default=1.0, low=1e-6),
    )
