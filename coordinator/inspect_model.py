"""What is in a model file: geometry, and bytes per layer and kind. The answer of the inspect command.

inspect makes plain data for --json; render turns that data into tables. Names from the file are shown as
Text, escaped, so that neither markup nor escape sequences in them take effect.
"""

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from strata_coord.coordinator.chat_template import TEMPLATE_KEY
from strata_coord.coordinator.ggml_types import type_name
from strata_coord.coordinator.model_index import ModelIndex, load_model_index
from strata_coord.coordinator.printable import printable
from strata_coord.coordinator.state_sizes import (
    KV_DTYPE_BYTES,
    sequence_bytes_by_kind,
    token_bytes_by_kind,
)
from strata_coord.ipc.assignment import ModelGeometry, TensorExtent

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

_MIB = 1 << 20
_RUNS_SHOWN = 3


def inspect(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return what is in a model as JSON-ready data; sizes are in bytes.

    Raises:
        ModelError: the file is damaged, hostile or not supported.
    """
    index = load_model_index(path)
    geometry = index.geometry
    layers = [_layer(index, layer) for layer in range(geometry.num_layers)]
    table = index.ngram_table()
    head = [tensor for tensor in index.head_tensors() if tensor.name != index.embedding().name]
    embedding_bytes = index.embedding().num_bytes
    expert_bytes = sum(layer["expert_bytes"] for layer in layers)
    dense_bytes = sum(layer["dense_bytes"] for layer in layers)
    return {
        "path": index.path,
        "name": _text(index.metadata.get("general.name")),
        "architecture": geometry.architecture,
        "files": [{"path": file, "bytes": os.stat(file).st_size} for file in index.files],
        "geometry": asdict(geometry),
        "layers": layers,
        "embedding": _tensor(index.embedding()),
        "output": {**_tensor(index.output()), "tied": index.tied},
        "head_bytes": sum(tensor.num_bytes for tensor in head),
        "ngram_table": None if table is None else _tensor(table),
        "state": _state(geometry),
        "totals": {
            "tensors": len(index.tensors),
            "tensor_bytes": sum(tensor.num_bytes for tensor in index.tensors.values()),
            "expert_bytes": expert_bytes,
            "dense_bytes": dense_bytes,
            "embedding_bytes": embedding_bytes,
            "head_bytes": sum(tensor.num_bytes for tensor in head),
            "ngram_bytes": 0 if table is None else table.num_bytes,
            "bytes_by_type": _bytes_by_type(index.tensors.values()),
        },
        "tokenizer": _tokenizer(index),
        "chat_template": TEMPLATE_KEY in index.metadata,
    }


def _state(geometry: ModelGeometry) -> dict[str, Any]:
    """Return what a sequence takes in memory, in bytes: a token by type of keys and values, and the rest."""
    last = geometry.num_layers
    return {
        "bytes_per_token": {
            dtype: token_bytes_by_kind(geometry, 0, last, kv_dtype=dtype) for dtype in KV_DTYPE_BYTES
        },
        "bytes_per_sequence": sequence_bytes_by_kind(geometry, 0, last),
    }


def _layer(index: ModelIndex, layer: int) -> dict[str, Any]:
    experts = index.expert_tensors(layer)
    return {
        "layer": layer,
        "mixer": _mixer(index, layer),
        "dense_bytes": index.dense_bytes(layer),
        "dense_types": _type_names(index.layer_tensors(layer)),
        "expert_bytes": sum(tensor.num_bytes for tensor in experts),
        "expert_blob_bytes": index.expert_blob_bytes(layer),
        "expert_types": _expert_types(experts),  # in blob order
        "ngram": index.geometry.ngram is not None and layer in index.geometry.ngram.layers,
        "files": sorted({tensor.file for tensor in (*index.layer_tensors(layer), *experts)}),
    }


def _expert_types(tensors: Sequence[TensorExtent]) -> list[str]:
    """Return the type of each part of an expert; stacked tensors are a part each, matrices one in three."""
    step = max(len(tensors) // 3, 1) if tensors and len(tensors[0].shape) == 2 else 1
    return [type_name(tensor.ggml_type) for tensor in tensors[::step]]


def _mixer(index: ModelIndex, layer: int) -> str:
    if index.geometry.recurrent_layers[layer]:
        return "deltanet"
    sparse = index.geometry.sparse_attention
    if sparse is not None and sparse.compress_ratios[layer]:
        return "sparse attention"
    windows = index.geometry.attention.windows
    return f"attention over {windows[layer]} tokens" if windows and windows[layer] else "attention"


def _tensor(tensor: TensorExtent) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "type": type_name(tensor.ggml_type),
        "shape": list(tensor.shape),
        "bytes": tensor.num_bytes,
    }


def _type_names(tensors: Iterable[TensorExtent]) -> list[str]:
    """Return the types of some tensors, the one with most bytes first."""
    return list(_bytes_by_type(tensors))


def _bytes_by_type(tensors: Iterable[TensorExtent]) -> dict[str, int]:
    sums: Counter[str] = Counter()
    for tensor in tensors:
        sums[type_name(tensor.ggml_type)] += tensor.num_bytes
    return dict(sums.most_common())


def _tokenizer(index: ModelIndex) -> dict[str, Any] | None:
    """Return what the file says of its vocabulary, without building the tokenizer."""
    metadata = index.metadata
    if "tokenizer.ggml.tokens" not in metadata:
        return None
    return {
        "model": _text(metadata.get("tokenizer.ggml.model")),
        "pre": _text(metadata.get("tokenizer.ggml.pre")),
        "tokens": index.geometry.vocabulary_size,
        "real_tokens": index.geometry.num_real_tokens,
    }


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def render(report: Mapping[str, Any]) -> "RenderableType":
    """Return a report of inspect as tables, for any width of terminal."""
    from rich.console import Group
    from rich.text import Text

    name = printable(report["name"] or "model", limit=120)
    heading = Text(f"{name}: {printable(report['architecture'])}", style="bold")
    return Group(heading, _summary(report), Text(""), _layer_table(report["layers"]))


def _summary(report: Mapping[str, Any]) -> "Table":
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    for label, value in _summary_rows(report):
        table.add_row(Text(label), Text(value))
    return table


def _summary_rows(report: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    geometry, totals = report["geometry"], report["totals"]
    attention, experts = geometry["attention"], geometry["experts"]
    for file in report["files"]:
        yield "file", f"{printable(file['path'], limit=400)} ({_size(file['bytes'])})"
    recurrent = sum(geometry["recurrent_layers"])
    yield (
        "layers",
        f"{geometry['num_layers']} ({geometry['num_layers'] - recurrent} attention, {recurrent} DeltaNet)",
    )
    yield "hidden size", f"{geometry['hidden_size']}{_streams(geometry)}"
    yield "context", f"{geometry['context_tokens']} tokens"
    heads = f"{attention['num_heads']} heads, {attention['num_kv_heads']} KV heads"
    yield "attention", f"{heads}, {attention['head_dim']} wide"
    yield "experts", f"{experts['num_experts']}, {experts['experts_per_token']} per token{_shared(experts)}"
    yield "expert bytes", _size(totals["expert_bytes"])
    yield "dense bytes", _size(totals["dense_bytes"])
    yield "embedding", f"{_size(totals['embedding_bytes'])}, {report['embedding']['type']}"
    output = report["output"]
    tied = ", tied to the embedding" if output["tied"] else ""
    yield "head", f"{_size(totals['head_bytes'])}, {output['type']}{tied}"
    if (ngram := report["ngram_table"]) is not None:
        yield (
            "n-gram table",
            f"{_size(ngram['bytes'])}, {ngram['type']}, {ngram['shape'][0]} rows, read row by row",
        )
    yield from _state_rows(report["state"])
    yield "types", ", ".join(f"{kind} {_size(size)}" for kind, size in totals["bytes_by_type"].items())
    yield "tokenizer", _tokenizer_line(report["tokenizer"])
    yield "chat template", "yes" if report["chat_template"] else "no; the built-in ChatML template is used"


def _state_rows(state: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    tokens = {dtype: sum(kinds.values()) for dtype, kinds in state["bytes_per_token"].items()}
    yield "state per token", ", ".join(f"{dtype} {_size(size)}" for dtype, size in tokens.items())
    kinds = {kind: size for kind, size in state["bytes_per_sequence"].items() if size}
    parts = ", ".join(f"{kind.replace('_', ' ')} {_size(size)}" for kind, size in kinds.items())
    yield "state per sequence", f"{_size(sum(kinds.values()))} ({parts})" if kinds else "none besides"


def _streams(geometry: Mapping[str, Any]) -> str:
    connections = geometry["hyper_connections"]
    return f" x {connections['num_streams']} residual streams" if connections else ""


def _shared(experts: Mapping[str, Any]) -> str:
    return f", shared expert {experts['shared_width']} wide" if experts["shared_width"] else ""


def _tokenizer_line(tokenizer: Mapping[str, Any] | None) -> str:
    if tokenizer is None:
        return "none; only --prompt-ids works"
    kind = printable(f"{tokenizer['model']}, {tokenizer['pre']}", limit=80)
    return f"{kind}, {tokenizer['real_tokens']} tokens in {tokenizer['tokens']} rows"


def _layer_table(layers: list[Mapping[str, Any]]) -> "Table":
    """One row per run of equal layers: real models repeat two or three kinds."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("layers", overflow="fold")
    table.add_column("mixer", overflow="fold")
    table.add_column("dense", justify="right", overflow="fold")
    table.add_column("experts", justify="right", overflow="fold")
    table.add_column("one expert", justify="right", overflow="fold")
    table.add_column("expert types", overflow="fold")
    kinds: dict[tuple[object, ...], list[int]] = {}
    for layer in layers:
        mixer = layer["mixer"] + (" + n-gram" if layer["ngram"] else "")
        key = (
            mixer,
            layer["dense_bytes"],
            layer["expert_bytes"],
            layer["expert_blob_bytes"],
            " ".join(layer["expert_types"]),
        )
        kinds.setdefault(key, []).append(layer["layer"])
    for (mixer, dense, experts, blob, types), numbers in kinds.items():
        cells = [_ranges(numbers), str(mixer), _size(dense), _size(experts), _size(blob), str(types)]
        table.add_row(*(Text(cell) for cell in cells))
    return table


def _ranges(numbers: list[int]) -> str:
    """Write ascending layer numbers shortly: 0-2 4-6, or 3 7 11 ... 47 for many that stand alone."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    words = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    if len(words) > 2 * _RUNS_SHOWN:
        words = [*words[:_RUNS_SHOWN], "...", words[-1], f"({len(numbers)})"]
    return " ".join(words)


def _size(size: object) -> str:
    """Write bytes in the unit that a person compares: KiB, MiB or GiB."""
    count = int(str(size))
    if count < _MIB:
        return f"{count / 1024:.1f} KiB"
    return f"{count / _MIB:.1f} MiB" if count < 1024 * _MIB else f"{count / _MIB / 1024:.2f} GiB"
