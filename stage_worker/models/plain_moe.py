"""The plain MoE families: attention and experts on one residual stream, by the geometry.

llama (Mixtral): neighbouring dims are rotated together. glm4moe (GLM-4.5): sigmoid router with a bias for the
choice, first layers without experts, an ungated shared expert. gpt-oss: sinks, windows, biases everywhere, a
clamped activation.
"""

from strata_coord.ipc.assignment import ModelGeometry
from strata_coord.stage_worker.models.family import NgramTable
from strata_coord.stage_worker.models.plain_residual import PlainResidualFamily


def build_llama(geometry: ModelGeometry, table: NgramTable | None) -> PlainResidualFamily:
    """Return the family for a model's sizes."""
    del table
    return PlainResidualFamily(geometry, expert_norm="ffn_norm.weight")


def build_post_attention_norm(geometry: ModelGeometry, table: NgramTable | None) -> PlainResidualFamily:
    """Return the family for a model's sizes: glm4moe or gpt-oss, whose second norm has another name."""
    del table
    return PlainResidualFamily(geometry, expert_norm="post_attention_norm.weight")
