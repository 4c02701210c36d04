"""Which tensors a synthetic model has, and how wide their values are.

Widths keep activations near one through any number of layers.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from strata_coord.coordinator.model_tensors import embedding_slots, expert_slots, head_slots, layer_slots
from strata_coord.coordinator.synthetic_blocks import BF16, F32, row_bytes
from strata_coord.coordinator.synthetic_ngram import ngram_table_rows
from strata_coord.coordinator.synthetic_types import TypeRecipe
from strata_coord.ipc.assignment import ModelGeometry

NGRAM_TABLE = "per_layer_token_embd.weight"


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
    if part.endswith(".bias"):
        return 0.1, 0.0
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
    "attn_sinks": (1.0, 0.0),
    "ssm_conv1d": (0.5, 0.0),
    "ple_conv1d": (0.3, 0.0),
}
_GAINS = {"ffn_gate_inp": 1.5, "output": 1.5}
_F32_PARTS = frozenset(
    {"ffn_gate_inp", "ffn_gate_inp_shexp", "ssm_alpha", "ssm_beta", "ssm_ba", "ssm_conv1d", "ple_conv1d"}
)


def _type(name: str, shape: tuple[int, ...], recipe: TypeRecipe) -> int:
    part = _part(name)
    if len(shape) == 1 or part in _F32_PARTS or part.endswith(("_inject", ".bias")):
        return F32
    if part.startswith("indexer."):
        return BF16
    kind = _KINDS.get(part, "dense")
    layer = int(name.split(".")[1]) if kind in ("gate_up", "down") else None
    return recipe.choose(kind, name=name, layer=layer, row_length=shape[-1])


_KINDS = {
    "token_embd": "embedding",
    "output": "output",
    "per_layer_token_embd": "table",
    "ffn_gate_exps": "gate_up",
    "ffn_up_exps": "gate_up",
    "ffn_down_exps": "down",
}
