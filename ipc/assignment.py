"""What a stage is told once, at set-up: model geometry, byte extents, budgets. Plain records, no logic.

The coordinator reads the model's header and decides every size; a stage never parses the file or plans. The
assignment travels as msgpack inside the setup memfd (codec.encode_record), since it can exceed a control
message's limit.
"""

from dataclasses import dataclass
from typing import Literal

ComputeDtype = Literal["fp32", "bf16"]
KvDtype = Literal["fp32", "fp16", "bf16", "int8"]  # int8: one fp32 scale per token and key-value head

# Positions of one page of keys and values, in every stage alike; a sequence takes whole pages.
KV_PAGE_TOKENS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnGeometry:
    """YaRN: slow rotations are interpolated by factor, fast ones kept, with a ramp between."""

    factor: float
    original_tokens: int  # context that the model was trained with
    beta_fast: float  # rotations over original_tokens at and above which a frequency is kept
    beta_slow: float  # at and below which it is divided by factor
    magnitude: float  # multiplies cos and sin
    whole_pairs: bool = True  # the ramp begins and ends on a pair of dims


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionGeometry:
    """Grouped-query attention; models.md section 1.1."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_dims: int  # leading dims of a head that are rotated
    rope_base: float
    gated: bool  # attn_q rows are interleaved per head: query rows, then gate rows
    head_norms: bool = True  # queries and keys are normed per head
    projection_biases: bool = False  # of queries, keys and values
    yarn: YarnGeometry | None = None
    rope_pairs: Literal["halves", "neighbours"] = "halves"  # dims j and j + rope_dims / 2, or 2j and 2j + 1
    output_bias: bool = False
    sinks: bool = False  # a learned logit per head takes part in the softmax and adds nothing
    windows: tuple[int, ...] = ()  # per layer: positions a row sees, its own included; 0 or no entry: all


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNetGeometry:
    """Gated DeltaNet; models.md section 1.1."""

    num_key_heads: int
    num_value_heads: int
    head_dim: int  # dk == dv
    conv_kernel: int
    head_order: Literal["grouped", "tiled"]  # value head h reads key head h // r, or h % num_key_heads
    output_gate: Literal["silu", "sigmoid"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertGeometry:
    """Routed experts and the shared expert."""

    num_experts: int
    experts_per_token: int
    widths: tuple[int, ...]  # F of each layer; 0: the layer has no routed experts but one MLP of dense_width
    shared_width: int  # 0: no shared expert
    renormalised: bool = True  # the weights of a row's experts are scaled to sum 1
    dense_width: int = 0
    shared_gate: bool = True  # the shared expert's result is scaled by a sigmoid of its own
    scores: Literal["softmax", "sigmoid"] = "softmax"  # of router logits, over all experts
    router_bias: bool = False  # added to router logits
    selection_bias: bool = False  # added to scores for the choice alone, not for the weights
    weight_scale: float = 1.0  # of the weights, after they are renormalised
    groups: int = 1  # experts are chosen from the best groups_used of so many equal groups
    groups_used: int = 1
    biases: bool = False  # every matrix of a routed expert has a bias
    activation: Literal["swiglu", "clamped-swiglu"] = "swiglu"

    def count(self, layer: int) -> int:
        """Routed experts of a layer: all of them, or none."""
        return self.num_experts if self.widths[layer] else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HyperConnectionGeometry:
    """Residual streams; models.md section 1.5.1."""

    num_streams: int
    low_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseAttentionGeometry:
    """QSA indexer; models.md section 1.5.3. compress_ratios[layer] 0: plain dense attention."""

    num_heads: int
    head_dim: int
    budget_tokens: int
    compress_ratios: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NgramGeometry:
    """PLE n-gram embedding; models.md section 1.5.2."""

    layers: tuple[int, ...]  # zero-based
    ngram_size: int
    heads_per_ngram: int
    conv_kernel: int
    eos_token: int
    row_width: int
    multipliers: tuple[int, ...]  # exact unsigned 64-bit
    head_offsets: tuple[int, ...]
    head_vocab_sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelGeometry:
    """Everything about the architecture that is not a tensor."""

    architecture: str
    num_layers: int  # trunk only; MTP blocks are not counted
    hidden_size: int
    vocabulary_size: int  # rows of token_embd
    num_real_tokens: int  # ids at and above are padding and are never sampled
    context_tokens: int  # the model's own limit
    rms_epsilon: float
    attention: AttentionGeometry
    experts: ExpertGeometry
    recurrent_layers: tuple[bool, ...]  # True: Gated DeltaNet, False: attention
    delta_net: DeltaNetGeometry | None = None
    hyper_connections: HyperConnectionGeometry | None = None
    sparse_attention: SparseAttentionGeometry | None = None
    ngram: NgramGeometry | None = None

    @property
    def row_width(self) -> int:
        """Floats of one residual row."""
        return self.hidden_size * (self.hyper_connections.num_streams if self.hyper_connections else 1)

    @property
    def has_histories(self) -> bool:
        """Whether any layer remembers more than keys and values.

        Then a sequence cannot be cut back to any position, only to where a snapshot was taken. Asked of the
        whole model, so that a stage that has none of those layers answers like the others.
        """
        sparse = self.sparse_attention
        has_raw_keys = sparse is not None and any(sparse.compress_ratios)
        return any(self.recurrent_layers) or has_raw_keys or self.ngram is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorExtent:
    """Where a tensor's bytes lie. shape is in torch order: a matrix is [out, in], experts [E, out, in]."""

    name: str
    file: int  # index into the list of model files
    offset_bytes: int  # from the start of that file
    num_bytes: int
    ggml_type: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageAssignment:
    """One stage's work. Layers are [first_layer, last_layer)."""

    stage: int
    num_stages: int
    first_layer: int
    last_layer: int
    geometry: ModelGeometry
    files: tuple[str, ...]  # absolute paths
    tensors: tuple[TensorExtent, ...]  # this stage's own, nothing else
    device: str  # "cpu" or "cuda:N"
    numa_node: int  # -1: not bound
    cpu_threads: int
    super_chunk_tokens: int  # the largest S that any prompt may use
    sub_chunk_tokens: int  # the largest c
    expert_group_rows: int  # rows of one expert multiplication, bounds scratch
    resident_experts: tuple[tuple[int, ...], ...]  # per own layer, ascending: kept in device memory
    arena_experts: tuple[tuple[int, ...], ...]  # per own layer, ascending: kept in host memory
    window_slots: int  # blobs of the largest size in the window ring
    kv_dtype: KvDtype
    kv_pool_tokens: int
    max_sequences: int
    context_tokens: int  # length of a row of the token table
    compute_dtype: ComputeDtype = "fp32"  # of expanded weights and matrix products; rows and sums are fp32
    upload_group: int = 1  # streamed experts per copy into the window, where they lie side by side
    max_snapshots: int = 0  # of sequence state; their pages come from the KV pool, the rest has own room
    debug_delay_s: float = 0.0  # experiments: sleep per super-chunk, to make overlap visible
