"""Which tensors an architecture has and what shapes they must have: models.md sections 1.2 to 1.5.

A slot is one place in the model. It is filled by one of several forms: plain attn_q, attn_k and attn_v, or
the fused attn_qkv. Shapes are in torch order.
"""

from collections.abc import Mapping, Sequence

from strata_coord.coordinator.ggml_types import WEIGHT_TYPES, type_name
from strata_coord.coordinator.gguf_metadata import Metadata
from strata_coord.coordinator.model_geometry import FAMILIES
from strata_coord.coordinator.printable import printable
from strata_coord.coordinator.unused_tensors import refuse_unused
from strata_coord.ipc.assignment import ModelGeometry, TensorExtent
from strata_coord.ipc.errors import InvariantError

Shape = tuple[int, ...]
Form = Mapping[str, Shape]  # tensor name -> shape
Slot = Sequence[Form]  # the first form whose tensors are all in the file is taken

_NOT_WEIGHTS = frozenset({"Q8_1", "Q8_K", "I8", "I16", "I32", "I64", "F64"})
_NAMES_SHOWN = 5


def is_supported_type(ggml_type: int) -> bool:
    """Return whether tensors of this type can be multiplied with: the stages' kernels expand it."""
    return type_name(ggml_type) in WEIGHT_TYPES


class TensorCheck:
    """Fills slots from the file's tensors and collects what is missing, so that one error names it all."""

    def __init__(self, metadata: Metadata, tensors: Mapping[str, TensorExtent]) -> None:
        self._metadata = metadata
        self._tensors = tensors
        self._missing: list[str] = []
        self._taken: set[str] = set()

    def take(self, slots: Sequence[Slot]) -> tuple[TensorExtent, ...]:
        """Return the tensors that fill the slots, in slot order.

        Raises:
            ModelError: a shape disagrees with the metadata, or a type cannot hold weights.
        """
        taken: list[TensorExtent] = []
        for slot in slots:
            form = next((form for form in slot if all(name in self._tensors for name in form)), None)
            if form is None:
                self._missing += [name for name in slot[0] if name not in self._tensors]
                continue
            for name, shape in form.items():
                self._check(self._tensors[name], shape)
                taken.append(self._tensors[name])
                self._taken.add(name)
        return tuple(taken)

    def finish(self) -> None:
        """Raise ModelError if a slot stayed empty, or if a tensor fills none."""
        if not self._missing:
            refuse_unused(self._metadata, (name for name in self._tensors if name not in self._taken))
            return
        names = ", ".join(printable(name) for name in self._missing[:_NAMES_SHOWN])
        more = len(self._missing) - _NAMES_SHOWN
        rest = f" and {more} more" if more > 0 else ""
        self._metadata.refuse("tensors", f"{len(self._missing)} missing: {names}{rest}")

    def _check(self, tensor: TensorExtent, shape: Shape) -> None:
        # Converters write vectors as [n] or [1, n]; the bytes are the same.
        if _without_leading_ones(tensor.shape) != _without_leading_ones(shape):
            self._metadata.refuse(
                f"tensor {tensor.name}", f"shape {list(tensor.shape)}, the metadata asks for {list(shape)}"
            )
        if type_name(tensor.ggml_type) in _NOT_WEIGHTS:
            self._metadata.refuse(
                f"tensor {tensor.name}", f"type {type_name(tensor.ggml_type)} is not a type of weights"
            )
        if not is_supported_type(tensor.ggml_type):
            supported = ", ".join(sorted(WEIGHT_TYPES))
            self._metadata.refuse(
                f"tensor {tensor.name}",
                f"type {type_name(tensor.ggml_type)} is not supported; supported are {supported}",
            )


def embedding_slots(geometry: ModelGeometry) -> list[Slot]:
    """Return the slot of the token embedding."""
    return [[{"token_embd.weight": (geometry.vocabulary_size, geometry.hidden_size)}]]


def head_slots(geometry: ModelGeometry, *, tied: bool) -> list[Slot]:
    """Return what the last stage needs after its layers; tied: the embedding is the output matrix."""
    hidden, vocabulary = geometry.hidden_size, geometry.vocabulary_size
    output: Slot = [{"token_embd.weight" if tied else "output.weight": (vocabulary, hidden)}]
    if geometry.hyper_connections is None:
        return [[{"output_norm.weight": (hidden,)}], output]
    row, rank = geometry.row_width, geometry.hyper_connections.low_rank
    mixer: list[Slot] = [
        [{"output_hc_norm.weight": (row,)}],
        [{"output_hc_down.weight": (rank, row)}],
        [{"output_hc_up.weight": (row, rank)}],
    ]
    return [*mixer, output]


def layer_slots(geometry: ModelGeometry, layer: int) -> list[Slot]:
    """Return the slots of one layer without its routed experts."""
    family = FAMILIES[geometry.architecture]
    hidden = geometry.hidden_size
    slots: list[Slot] = []
    if geometry.hyper_connections is None:
        slots += [[{_name(layer, "attn_norm"): (hidden,)}], [{_name(layer, family.ffn_norm): (hidden,)}]]
    else:
        slots += _hyper_connection_slots(geometry, layer)
    slots += (
        _delta_net_slots(geometry, layer)
        if geometry.recurrent_layers[layer]
        else _attention_slots(geometry, layer)
    )
    slots += _router_slots(geometry, layer)
    if geometry.ngram is not None and layer in geometry.ngram.layers:
        slots += _ngram_slots(geometry, layer)
    return slots


def expert_slots(geometry: ModelGeometry, layer: int) -> list[Slot]:
    """Return the slots of a layer's routed experts, in blob order: gate, up (or both fused), down.

    Old files have a tensor for each expert. A layer without routed experts has no slots.
    """
    count, hidden = geometry.experts.count(layer), geometry.hidden_size
    width = geometry.experts.widths[layer]
    if not count:
        return []
    plain: Form = {
        _name(layer, "ffn_gate_exps"): (count, width, hidden),
        _name(layer, "ffn_up_exps"): (count, width, hidden),
    }
    fused: Form = {_name(layer, "ffn_gate_up_exps"): (count, 2 * width, hidden)}
    single: Form = {
        _name(layer, f"ffn_{part}.{expert}"): (width, hidden)
        for part in ("gate", "up")
        for expert in range(count)
    }
    single_down: Form = {_name(layer, f"ffn_down.{expert}"): (hidden, width) for expert in range(count)}
    return [
        [plain, fused, single],
        [{_name(layer, "ffn_down_exps"): (count, hidden, width)}, single_down],
    ]


def _router_slots(geometry: ModelGeometry, layer: int) -> list[Slot]:
    """Return the slots of router, biases and shared expert, or those of the layer's only MLP."""
    experts, hidden = geometry.experts, geometry.hidden_size
    count, width = experts.count(layer), experts.widths[layer]
    if not count:
        return _mlp_slots(layer, "", experts.dense_width, hidden)
    slots: list[Slot] = [[{_name(layer, "ffn_gate_inp"): (count, hidden)}]]
    if experts.router_bias:
        slots.append([{_name(layer, "ffn_gate_inp", ".bias"): (count,)}])
    if experts.selection_bias:
        slots.append([{_name(layer, "exp_probs_b", ".bias"): (count,)}])
    if experts.biases:
        slots += [
            [{_name(layer, f"ffn_{part}_exps", ".bias"): (count, out)}]
            for part, out in (("gate", width), ("up", width), ("down", hidden))
        ]
    if experts.shared_width:
        slots += _mlp_slots(layer, "_shexp", experts.shared_width, hidden)
        if experts.shared_gate:
            slots.append([{_name(layer, "ffn_gate_inp_shexp"): (hidden,)}])
    return slots


def _mlp_slots(layer: int, suffix: str, width: int, hidden: int) -> list[Slot]:
    return [
        [{_name(layer, f"ffn_gate{suffix}"): (width, hidden)}],
        [{_name(layer, f"ffn_up{suffix}"): (width, hidden)}],
        [{_name(layer, f"ffn_down{suffix}"): (hidden, width)}],
    ]


def _name(layer: int, part: str, suffix: str = ".weight") -> str:
    return f"blk.{layer}.{part}{suffix}"


def _attention_slots(geometry: ModelGeometry, layer: int) -> list[Slot]:
    attention, hidden = geometry.attention, geometry.hidden_size
    out = attention.num_heads * attention.head_dim
    query = 2 * out if attention.gated else out
    key = attention.num_kv_heads * attention.head_dim
    rows = {"attn_q": query, "attn_k": key, "attn_v": key}
    plain: Form = {_name(layer, name): (out_rows, hidden) for name, out_rows in rows.items()}
    fused: Form = {_name(layer, "attn_qkv"): (query + 2 * key, hidden)}
    slots: list[Slot] = [[plain, fused], [{_name(layer, "attn_output"): (hidden, out)}]]
    if attention.projection_biases:
        biases: Form = {_name(layer, name, ".bias"): (out_rows,) for name, out_rows in rows.items()}
        slots.append([biases, {_name(layer, "attn_qkv", ".bias"): (query + 2 * key,)}])
    if attention.head_norms:
        slots += [
            [{_name(layer, "attn_q_norm"): (attention.head_dim,)}],
            [{_name(layer, "attn_k_norm"): (attention.head_dim,)}],
        ]
    if attention.output_bias:
        slots.append([{_name(layer, "attn_output", ".bias"): (hidden,)}])
    if attention.sinks:
        slots.append([{_name(layer, "attn_sinks"): (attention.num_heads,)}])
    sparse = geometry.sparse_attention
    if sparse is not None and sparse.compress_ratios[layer]:
        slots += [
            [{_name(layer, "indexer.q_proj"): (sparse.num_heads * sparse.head_dim, hidden)}],
            [{_name(layer, "indexer.k_proj"): (sparse.head_dim, hidden)}],
            [{_name(layer, "indexer.q_norm"): (sparse.head_dim,)}],
            [{_name(layer, "indexer.k_norm"): (sparse.head_dim,)}],
        ]
    return slots


def _delta_net_slots(geometry: ModelGeometry, layer: int) -> list[Slot]:
    net, hidden = geometry.delta_net, geometry.hidden_size
    if net is None:
        message = f"layer {layer} is recurrent and the geometry has no DeltaNet"
        raise InvariantError(message)
    values = net.num_value_heads * net.head_dim
    channels = 2 * net.num_key_heads * net.head_dim + values
    projections: list[Form] = [
        {_name(layer, "attn_qkv"): (channels, hidden), _name(layer, "attn_gate"): (values, hidden)}
    ]
    heads: list[Form] = [
        {
            _name(layer, "ssm_alpha"): (net.num_value_heads, hidden),
            _name(layer, "ssm_beta"): (net.num_value_heads, hidden),
        }
    ]
    if net.head_order == "grouped":  # joint forms lie per key head, which tiled value heads do not
        projections.append({_name(layer, "ssm_in"): (channels + values, hidden)})
        heads.insert(0, {_name(layer, "ssm_ba"): (2 * net.num_value_heads, hidden)})
    return [
        projections,
        heads,
        [{_name(layer, "ssm_conv1d"): (channels, net.conv_kernel)}],
        [{_name(layer, "ssm_a", ""): (net.num_value_heads,)}],
        [{_name(layer, "ssm_dt", ".bias"): (net.num_value_heads,)}],
        [{_name(layer, "ssm_norm"): (net.head_dim,)}],
        [{_name(layer, "ssm_out"): (hidden, values)}],
    ]


def _hyper_connection_slots(geometry: ModelGeometry, layer: int) -> list[Slot]:
    connections, row = geometry.hyper_connections, geometry.row_width
    if connections is None:
        message = f"layer {layer} asks for hyper-connections and the geometry has none"
        raise InvariantError(message)
    slots: list[Slot] = []
    for half in ("attn", "ffn"):
        slots += [
            [{_name(layer, f"hc_{half}_norm"): (row,)}],
            [{_name(layer, f"hc_{half}_down"): (connections.low_rank, row)}],
            [{_name(layer, f"hc_{half}_up"): (row, connections.low_rank)}],
            [{_name(layer, f"hc_{half}_inject"): (connections.num_streams, row)}],
        ]
    return slots


def _ngram_slots(geometry: ModelGeometry, layer: int) -> list[Slot]:
    ngram, hidden, row = geometry.ngram, geometry.hidden_size, geometry.row_width
    if ngram is None:
        message = f"layer {layer} asks for an n-gram embedding and the geometry has none"
        raise InvariantError(message)
    width = len(ngram.head_offsets) * ngram.row_width
    return [
        [{_name(layer, "ple_key"): (row, width)}],
        [{_name(layer, "ple_value"): (hidden, width)}],
        [{_name(layer, "ple_norm_key"): (row,)}],
        [{_name(layer, "ple_norm_query"): (row,)}],
        [{_name(layer, "ple_norm_conv"): (row,)}],
        [{_name(layer, "ple_conv1d"): (row, ngram.conv_kernel)}],
    ]


def _without_leading_ones(shape: Shape) -> Shape:
    for index, dim in enumerate(shape):
        if dim != 1:
            return shape[index:]
    return ()
