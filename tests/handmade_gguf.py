"""GGUF files built byte by byte, right or wrong on purpose. Knows nothing of the product's reader."""

import struct
from pathlib import Path

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
_CODES = {
    U8: "B",
    I8: "b",
    U16: "H",
    I16: "h",
    U32: "I",
    I32: "i",
    F32: "f",
    BOOL: "B",
    U64: "Q",
    I64: "q",
    F64: "d",
}


def string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def scalar(kind: int, value: float) -> bytes:
    return struct.pack("<" + _CODES[kind], value)


def array(kind: int, values: list) -> bytes:
    body = b"".join(string(v) if kind == STRING else scalar(kind, v) for v in values)
    return struct.pack("<IQ", kind, len(values)) + body


def key(name: str | bytes, kind: int, payload: bytes) -> bytes:
    return string(name) + struct.pack("<I", kind) + payload


def auto_key(name: str, value: object) -> bytes:
    """Encode a Python value: bool, int (U32 or U64), float (F32), str, list of one of these."""
    if isinstance(value, list):
        return key(name, ARRAY, array(_kind(value[0]) if value else U32, value))
    kind = _kind(value)
    return key(name, kind, string(value) if isinstance(value, str) else scalar(kind, value))


def _kind(value: object) -> int:
    if isinstance(value, bool):
        return BOOL
    if isinstance(value, int):
        return U32 if 0 <= value < 1 << 32 else U64
    return STRING if isinstance(value, str) else F32


def tensor(
    name: str | bytes, dims: list[int], kind: int, offset: int, *, num_dims: int | None = None
) -> bytes:
    """One tensor record; dims fastest first, as in the file."""
    head = string(name) + struct.pack("<I", len(dims) if num_dims is None else num_dims)
    return head + struct.pack(f"<{len(dims)}Q", *dims) + struct.pack("<IQ", kind, offset)


def gguf(
    keys: list[bytes],
    tensors: list[bytes],
    data: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    num_keys: int | None = None,
    num_tensors: int | None = None,
    alignment: int = 32,
) -> bytes:
    head = magic + struct.pack(
        "<IQQ",
        version,
        len(tensors) if num_tensors is None else num_tensors,
        len(keys) if num_keys is None else num_keys,
    )
    body = head + b"".join(keys) + b"".join(tensors)
    padding = b"\0" * (-len(body) % alignment) if data else b""
    return body + padding + data


def write_model(
    path: Path, keys: dict[str, object], shapes: dict[str, tuple[int, ...]], kind: int = 0
) -> Path:
    """Write a model of zeros with F32 (0) or F16 (1) tensors; shapes in torch order. The file is sparse."""
    element = {0: 4, 1: 2}[kind]
    records, offset = [], 0
    for name, shape in shapes.items():
        count = 1
        for dim in shape:
            count *= dim
        records.append(tensor(name, list(reversed(shape)), kind, offset))
        offset += -(-count * element // 32) * 32
    head = gguf([auto_key(name, value) for name, value in keys.items()], records)
    with path.open("wb") as file:
        file.write(head)
        file.truncate(-(-len(head) // 32) * 32 + offset)
    return path


def qwen3moe() -> tuple[dict[str, object], dict[str, tuple[int, ...]]]:
    """Keys and tensors of a small qwen3moe model: 2 layers, 4 experts of width 16, hidden 32, 24 tokens."""
    keys: dict[str, object] = {
        "general.architecture": "qwen3moe",
        "qwen3moe.block_count": 2,
        "qwen3moe.context_length": 128,
        "qwen3moe.embedding_length": 32,
        "qwen3moe.attention.head_count": 4,
        "qwen3moe.attention.head_count_kv": 2,
        "qwen3moe.attention.key_length": 8,
        "qwen3moe.attention.value_length": 8,
        "qwen3moe.attention.layer_norm_rms_epsilon": 1e-6,
        "qwen3moe.rope.freq_base": 1e6,
        "qwen3moe.expert_count": 4,
        "qwen3moe.expert_used_count": 2,
        "qwen3moe.expert_feed_forward_length": 16,
    }
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (24, 32),
        "output.weight": (24, 32),
        "output_norm.weight": (32,),
    }
    for layer in range(2):
        shapes |= {
            f"blk.{layer}.{name}.weight": shape
            for name, shape in {
                "attn_norm": (32,),
                "ffn_norm": (32,),
                "attn_q": (32, 32),
                "attn_k": (16, 32),
                "attn_v": (16, 32),
                "attn_output": (32, 32),
                "attn_q_norm": (8,),
                "attn_k_norm": (8,),
                "ffn_gate_inp": (4, 32),
                "ffn_gate_exps": (4, 16, 32),
                "ffn_up_exps": (4, 16, 32),
                "ffn_down_exps": (4, 32, 16),
            }.items()
        }
    return keys, shapes


def qwen4exp() -> tuple[dict[str, object], dict[str, tuple[int, ...]]]:
    """Keys and tensors of a small qwen4exp model: 4 layers (layer 3 attends), n-gram embedding on layer 1."""
    a = "qwen4exp"
    keys: dict[str, object] = {
        "general.architecture": a,
        f"{a}.block_count": 4,
        f"{a}.context_length": 256,
        f"{a}.embedding_length": 32,
        f"{a}.attention.head_count": 4,
        f"{a}.attention.head_count_kv": 2,
        f"{a}.attention.key_length": 8,
        f"{a}.attention.value_length": 8,
        f"{a}.attention.layer_norm_rms_epsilon": 1e-6,
        f"{a}.rope.freq_base": 1e7,
        f"{a}.rope.dimension_count": 4,
        f"{a}.expert_count": 4,
        f"{a}.expert_used_count": 2,
        f"{a}.expert_feed_forward_length": 16,
        f"{a}.expert_shared_feed_forward_length": 24,
        f"{a}.full_attention_interval": 4,
        f"{a}.ssm.conv_kernel": 4,
        f"{a}.ssm.state_size": 8,
        f"{a}.ssm.group_count": 2,
        f"{a}.ssm.time_step_rank": 6,
        f"{a}.ssm.inner_size": 48,
        f"{a}.hyper_connection.count": 4,
        f"{a}.hyper_connection.low_rank": 8,
        f"{a}.attention.indexer.head_count": 2,
        f"{a}.attention.indexer.key_length": 8,
        f"{a}.attention.indexer.top_k": 16,
        f"{a}.attention.compress_ratios": [0, 0, 0, 4],
        f"{a}.ple.layers": [1],
        f"{a}.ple.ngram_size": 3,
        f"{a}.ple.heads_per_ngram": 2,
        f"{a}.ple.conv_kernel": 4,
        f"{a}.ple.eos_token_id": 3,
        f"{a}.embedding_length_per_layer_input": 8,
        f"{a}.ple.layer_multipliers": [1 << 63, (1 << 64) - 1, 1 << 40],
        f"{a}.ple.head_offsets": [0, 11, 24, 41],
        f"{a}.ple.head_vocab_sizes": [11, 13, 17, 19],
    }
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (24, 32),
        "output.weight": (24, 32),
        "output_hc_norm.weight": (128,),
        "output_hc_down.weight": (8, 128),
        "output_hc_up.weight": (128, 8),
        "per_layer_token_embd.weight": (64, 8),
    }
    for layer in range(4):
        parts: dict[str, tuple[int, ...]] = {
            f"hc_{half}_{part}.weight": shape
            for half in ("attn", "ffn")
            for part, shape in {"norm": (128,), "down": (8, 128), "up": (128, 8), "inject": (4, 128)}.items()
        }
        parts |= {
            "ffn_gate_inp.weight": (4, 32),
            "ffn_gate_exps.weight": (4, 16, 32),
            "ffn_up_exps.weight": (4, 16, 32),
            "ffn_down_exps.weight": (4, 32, 16),
            "ffn_gate_inp_shexp.weight": (32,),
            "ffn_gate_shexp.weight": (24, 32),
            "ffn_up_shexp.weight": (24, 32),
            "ffn_down_shexp.weight": (32, 24),
        }
        if layer == 3:
            parts |= {
                "attn_q.weight": (64, 32),
                "attn_k.weight": (16, 32),
                "attn_v.weight": (16, 32),
                "attn_output.weight": (32, 32),
                "attn_q_norm.weight": (8,),
                "attn_k_norm.weight": (8,),
                "indexer.q_proj.weight": (16, 32),
                "indexer.k_proj.weight": (8, 32),
                "indexer.q_norm.weight": (8,),
                "indexer.k_norm.weight": (8,),
            }
        else:
            parts |= {
                "attn_qkv.weight": (80, 32),
                "attn_gate.weight": (48, 32),
                "ssm_alpha.weight": (6, 32),
                "ssm_beta.weight": (6, 32),
                "ssm_conv1d.weight": (80, 4),
                "ssm_a": (6,),
                "ssm_dt.bias": (6,),
                "ssm_norm.weight": (8,),
                "ssm_out.weight": (32, 48),
            }
        if layer == 1:
            parts |= {
                "ple_key.weight": (128, 32),
                "ple_value.weight": (32, 32),
                "ple_norm_key.weight": (128,),
                "ple_norm_query.weight": (128,),
                "ple_norm_conv.weight": (128,),
                "ple_conv1d.weight": (128, 4),
            }
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in parts.items()}
    return keys, shapes
