"""Architecture name in the GGUF -> family. A closed table: what is not here is refused."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from strata_coord.ipc.assignment import ModelGeometry
from strata_coord.ipc.errors import ModelError
from strata_coord.stage_worker.models.family import Family, NgramTable
from strata_coord.stage_worker.models.plain_moe import build_llama, build_post_attention_norm
from strata_coord.stage_worker.models.qwen3moe import build_qwen3moe
from strata_coord.stage_worker.models.qwen3next import build_qwen3next
from strata_coord.stage_worker.models.qwen4exp import build_qwen4exp

BUILDERS: Mapping[str, Callable[[ModelGeometry, NgramTable | None], Family]] = MappingProxyType(
    {
        "glm4moe": build_post_attention_norm,
        "gpt-oss": build_post_attention_norm,
        "llama": build_llama,
        "qwen2moe": build_qwen3moe,
        "qwen3moe": build_qwen3moe,
        "qwen3next": build_qwen3next,
        "qwen3vlmoe": build_qwen3moe,
        "qwen35moe": build_qwen3next,
        "qwen4exp": build_qwen4exp,
    }
)


def build_family(geometry: ModelGeometry, *, table: NgramTable | None) -> Family:
    """Return the maths of a model. table: the n-gram table, on the stage that owns its layer.

    Raises:
        ModelError: the architecture is not supported, or its sizes do not fit.
    """
    builder = BUILDERS.get(geometry.architecture)
    if builder is None:
        supported = ", ".join(sorted(BUILDERS))
        message = f"architecture {geometry.architecture!r} is not supported; supported: {supported}"
        raise ModelError(message)
    return builder(geometry, table)
