"""Which tensors a synthetic model has, of what types, and how wide their values are.

Types follow published files: models.md sections 1.2, 1.5.5 and 3.2. Widths keep activations near one through
any number of layers.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from strata_coord.coordinator.ggml_types import GGML_TYPES
from strata_coord.coordinator.model_tensors import embedding_slots, expert_slots, head_slots, layer_slots
from strata_coord.coordinator.synthetic_blocks import (
    BF16,
    F32,
    IQ4_NL,
    Q4_K,
    Q5_1,
    Q5_K,
    Q6_K,
    Q8_0,
    row_bytes,
)
from strata_coord.coordinator.synthetic_geometry import ngram_table_rows
from strata_coord.ipc.assignment import ModelGeometry

NGRAM_TABLE = "per_layer_token_embd.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class TypeRecipe:
    """Types by kind of tensor. Where a row is no whole number of blocks, a narrow type takes its place."""

    embedding: int = Q8_0
    output: int = Q8_0
    dense: int = Q8_0
    table: int = IQ4_NL
    gate_up: int = Q4_K
    down: int = Q4_K
    narrow_expert: int = Q5_1
    narrow_dense: int = Q8_0
    # Layers whose experts have more bits, as the tools that make real files choose them: (gate and up, down).
    layer_experts: Mapping[int, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTensor:
    """One tensor to write. shape is in torch order; mean is not zero only in F32."""

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    std: float
    mean: float = 0.0

    @property
    def num_rows(self) -> int:
        """Rows of shape[-1] values."""
        return math.prod(self.shape[:-1])

    @property
    def num_bytes(self) -> int:
        """Bytes in the file, without padding."""
        return self.num_rows * row_bytes(self.ggml_type, self.shape[-1])


def recipe_for(like: str, geometry: ModelGeometry) -> TypeRecipe:
    """Return the types of the published file that a name stands for."""
    if like == "flash-next":
        # UD-Q4_K_XL.
        wide = {2: (Q5_K, Q8_0)} | dict.fromkeys((4, 30, 46, 47), (Q4_K, Q8_0))
        return TypeRecipe(layer_experts=wide)
    if like.startswith("qwen3-"):
        # Q4_K_M: more bits for down in the first and last eighth of the layers and in every third between.
        eighth = geometry.num_layers // 8
        more = [
            layer
            for layer in range(geometry.num_layers)
            if layer < eighth or layer >= geometry.num_layers - eighth or (layer - eighth) % 3 == 2
        ]
        return TypeRecipe(layer_experts=dict.fromkeys(more, (Q4_K, Q6_K)))
    return TypeRecipe(narrow_expert=Q8_0, table=Q8_0)


def planned_tensors(geometry: ModelGeometry, recipe: TypeRecipe) -> Iterator[PlannedTensor]:
    """Yield every tensor of the model, layer by layer."""
    plain = [*embedding_slots(geometry), *head_slots(geometry, tied=False)]
    for layer in range(geometry.num_layers):
        plain += layer_slots(geometry, layer)
        plain += expert_slots(geometry, layer)
    if geometry.ngram is not None:
        plain.append([{NGRAM_TABLE: (ngram_table_rows(geometry.ngram), geometry.ngram.row_width)}])
    for slot in plain:
        for name, shape in slot[0].items():
            yield _planned(name, shape, geometry, recipe)


def _planned(name: str, shape: tuple[int, ...], geometry: ModelGeometry, recipe: TypeRecipe) -> PlannedTensor:
    std, mean = _spread(_part(name), shape, geometry)
    return PlannedTensor(name=name, shape=shape, ggml_type=_type(name, shape, recipe), std=std, mean=mean)


def _part(name: str) -> str:
    """Return the name without block number and .weight."""
    part = name.split(".", 2)[2] if name.startswith("blk.") else name
    return part.removesuffix(".weight")


def _spread(part: str, shape: tuple[int, ...], geometry: ModelGeometry) -> tuple[float, float]:
    """Return standard deviation and mean of the values."""
    if part in _SPREADS:
        return _SPREADS[part]
    if len(shape) == 1 and part != "ffn_gate_inp_shexp":
        return 0.1, 1.0  # norms; the file holds 1 + w
    gain = _GAINS.get(part, 1.0)
    if part == "output" and geometry.hyper_connections is not None:
        # The head reads the mean of gated streams, which is narrower than a plain norm's output.
        gain *= 2.0
    return gain / math.sqrt(shape[-1]), 0.0


# ssm_a is -exp(A_log), and no value drawn lies beyond 3.47 standard deviations: always below zero.
_SPREADS = {
    "token_embd": (1.0, 0.0),
    "per_layer_token_embd": (1.0, 0.0),
    "ssm_a": (0.25, -1.0),
    "ssm_dt.bias": (1.0, -1.0),
    "ssm_conv1d": (0.5, 0.0),
    "ple_conv1d": (0.3, 0.0),
}
_GAINS = {"ffn_gate_inp": 1.5, "output": 1.5}
_F32_PARTS = ("ffn_gate_inp", "ffn_gate_inp_shexp", "ssm_alpha", "ssm_beta", "ssm_conv1d", "ple_conv1d")


def _type(name: str, shape: tuple[int, ...], recipe: TypeRecipe) -> int:
    part = _part(name)
    if len(shape) == 1 or part in _F32_PARTS or part.endswith("_inject"):
        return F32
    if part.startswith("indexer."):
        return BF16
    wanted = {
        "token_embd": recipe.embedding,
        "output": recipe.output,
        "per_layer_token_embd": recipe.table,
    }.get(part, recipe.dense)
    if part.endswith("_exps"):
        gate_up, down = recipe.layer_experts.get(int(name.split(".")[1]), (recipe.gate_up, recipe.down))
        wanted = down if part == "ffn_down_exps" else gate_up
    if shape[-1] % GGML_TYPES[wanted].block_elements == 0:
        return wanted
    return recipe.narrow_expert if part.endswith("_exps") else recipe.narrow_dense
