"""qwen3next and qwen35moe: Gated DeltaNet in most layers, gated attention in the others, a shared expert.

The two differ in the order of value heads (grouped, tiled), which the geometry names, and in tensor forms,
which the mixer tells apart by name.
"""

from strata_coord.ipc.assignment import ModelGeometry
from strata_coord.stage_worker.models.family import NgramTable
from strata_coord.stage_worker.models.plain_residual import PlainResidualFamily


def build_qwen3next(geometry: ModelGeometry, table: NgramTable | None) -> PlainResidualFamily:
    """Return the family for a model's sizes.

    Raises:
        ModelError: a layer is recurrent, and the model has no sizes for it.
    """
    del table
    return PlainResidualFamily(geometry, expert_norm="post_attention_norm.weight")
