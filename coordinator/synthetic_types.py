"""Of what types the tensors of a synthetic model are: those of published files, or those that a user names.

Published: models.md sections 1.2, 1.5.5 and 3.2.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NoReturn

from strata_coord.coordinator.ggml_types import GGML_TYPES
from strata_coord.coordinator.synthetic_blocks import (
    IQ4_NL,
    MAKEABLE_TYPES,
    MXFP4,
    Q4_K,
    Q5_1,
    Q5_K,
    Q6_K,
    Q8_0,
)
from strata_coord.ipc.assignment import ModelGeometry
from strata_coord.ipc.errors import ConfigError

# What a user may name -> the kinds of tensors that it means.
_NAMES: Mapping[str, tuple[str, ...]] = {
    "experts": ("gate_up", "down"),
    "gate_up": ("gate_up",),
    "down": ("down",),
    "dense": ("dense",),
    "embedding": ("embedding",),
    "output": ("output",),
    "table": ("table",),
    "narrow": (),
}
_NUMBERS = {GGML_TYPES[number].name: number for number in sorted(MAKEABLE_TYPES)}


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
    # Kinds for which a narrow type is no answer, since a user has named theirs.
    fixed: frozenset[str] = frozenset()

    def choose(self, kind: str, *, name: str, layer: int | None, row_length: int) -> int:
        """Return the type of a tensor.

        Args:
            kind: embedding, output, dense, table, gate_up or down.
            name: of the tensor, for the message.
            layer: of an expert tensor.
            row_length: values of a row.

        Raises:
            ConfigError: rows of this length cannot be of the type that the user has named.
        """
        wanted = {
            "embedding": self.embedding,
            "output": self.output,
            "table": self.table,
            "gate_up": self.gate_up,
            "down": self.down,
        }.get(kind, self.dense)
        if layer is not None and layer in self.layer_experts:
            wanted = self.layer_experts[layer][kind == "down"]
        if row_length % GGML_TYPES[wanted].block_elements == 0:
            return wanted
        if kind in self.fixed:
            _refuse(f"{kind}={GGML_TYPES[wanted].name}", name, row_length)
        narrow = self.narrow_expert if kind in ("gate_up", "down") else self.narrow_dense
        if row_length % GGML_TYPES[narrow].block_elements:
            _refuse(f"narrow={GGML_TYPES[narrow].name}", name, row_length)
        return narrow


def recipe_for(like: str, geometry: ModelGeometry) -> TypeRecipe:
    """Return the types of the published file that a name stands for."""
    if like == "tiny":
        return TypeRecipe(narrow_expert=Q8_0, table=Q8_0)
    if like == "flash-next":
        # UD-Q4_K_XL.
        wide = {2: (Q5_K, Q8_0)} | dict.fromkeys((4, 30, 46, 47), (Q4_K, Q8_0))
        return TypeRecipe(layer_experts=wide)
    if like.startswith("gpt-oss"):
        return TypeRecipe(gate_up=MXFP4, down=MXFP4)
    # Q4_K_M: more bits for down in the first and last eighth of the layers and in every third between.
    eighth = geometry.num_layers // 8
    more = [
        layer
        for layer in range(geometry.num_layers)
        if layer < eighth or layer >= geometry.num_layers - eighth or (layer - eighth) % 3 == 2
    ]
    return TypeRecipe(layer_experts=dict.fromkeys(more, (Q4_K, Q6_K)))


def with_types(recipe: TypeRecipe, text: str) -> TypeRecipe:
    """Return a recipe with the types that a user names: experts=Q4_K,down=Q5_1,dense=Q8_0.

    Whatever is named holds for all layers. narrow=TYPE is for rows that are no whole number of blocks;
    without it such a row is an error.

    Raises:
        ConfigError: a name or a type is not known, or a name is given twice.
    """
    given: dict[str, int] = {}
    for item in text.split(","):
        name, _, type_name = (part.strip() for part in item.partition("="))
        if name not in _NAMES:
            message = f'types: "{name}" is not known; known are {", ".join(_NAMES)}'
            raise ConfigError(message)
        if name in given:
            message = f'types: "{name}" is given twice'
            raise ConfigError(message)
        number = _NUMBERS.get(type_name.upper())
        if number is None:
            message = f'types: {name}: "{type_name}" is not a type; known are {", ".join(_NUMBERS)}'
            raise ConfigError(message)
        given[name] = number
    narrow = given.pop("narrow", None)
    kinds: dict[str, int] = {}
    # What means fewer kinds wins over what means more.
    for name in sorted(given, key=lambda name: -len(_NAMES[name])):
        kinds |= dict.fromkeys(_NAMES[name], given[name])
    found = replace(recipe, **kinds)  # type: ignore[arg-type]
    experts = {
        layer: (kinds.get("gate_up", types[0]), kinds.get("down", types[1]))
        for layer, types in recipe.layer_experts.items()
    }
    if narrow is None:
        return replace(found, layer_experts=experts, fixed=frozenset(kinds))
    return replace(found, layer_experts=experts, narrow_expert=narrow, narrow_dense=narrow)


def _refuse(choice: str, name: str, row_length: int) -> NoReturn:
    fitting = [known for known in _NUMBERS if row_length % GGML_TYPES[_NUMBERS[known]].block_elements == 0]
    message = (
        f"types: {choice} does not fit {name}, whose rows of {row_length} values are no whole number of "
        f"blocks; these fit: {', '.join(fitting)}; narrow=TYPE names one for all such tensors"
    )
    raise ConfigError(message)
