"""qwen3moe and the relatives that share its skeleton; the geometry says in what they differ.

qwen3moe: attention with head norms, routed experts. qwen3vlmoe: the same; its M-RoPE is plain RoPE for text.
qwen2moe: biases instead of head norms, a shared expert, weights that do not sum to 1.
"""

from strata_coord.ipc.assignment import ModelGeometry
from strata_coord.stage_worker.models.family import NgramTable
from strata_coord.stage_worker.models.plain_residual import PlainResidualFamily


def build_qwen3moe(geometry: ModelGeometry, table: NgramTable | None) -> PlainResidualFamily:
    """Return the family for a model's sizes."""
    del table
    return PlainResidualFamily(geometry, expert_norm="ffn_norm.weight")
