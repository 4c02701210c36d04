"""Sizes of published models, for tests of byte counts."""

from strata_coord.ipc.assignment import (
    AttentionGeometry,
    DeltaNetGeometry,
    ExpertGeometry,
    HyperConnectionGeometry,
    ModelGeometry,
    NgramGeometry,
    SparseAttentionGeometry,
)


def flash_next() -> ModelGeometry:
    """Qwen3.8-Flash-Next."""
    layers = 48
    recurrent = tuple((i + 1) % 4 != 0 for i in range(layers))
    return ModelGeometry(
        architecture="qwen4exp",
        num_layers=layers,
        hidden_size=2560,
        vocabulary_size=248320,
        num_real_tokens=248077,
        context_tokens=262144,
        rms_epsilon=1e-6,
        attention=AttentionGeometry(
            num_heads=24, num_kv_heads=2, head_dim=256, rope_dims=64, rope_base=1e7, gated=True
        ),
        experts=ExpertGeometry(
            num_experts=512, experts_per_token=10, widths=(640,) * layers, shared_width=640
        ),
        recurrent_layers=recurrent,
        delta_net=DeltaNetGeometry(
            num_key_heads=16,
            num_value_heads=48,
            head_dim=128,
            conv_kernel=4,
            head_order="tiled",
            output_gate="sigmoid",
        ),
        hyper_connections=HyperConnectionGeometry(num_streams=4, low_rank=320),
        sparse_attention=SparseAttentionGeometry(
            num_heads=4,
            head_dim=128,
            budget_tokens=2048,
            compress_ratios=tuple(0 if linear else 4 for linear in recurrent),
        ),
        ngram=NgramGeometry(
            layers=(1,),
            ngram_size=3,
            heads_per_ngram=8,
            conv_kernel=4,
            eos_token=248044,
            row_width=160,
            multipliers=(23703573157769, 20109073645365, 8052911324071),
            head_offsets=tuple(range(16)),
            head_vocab_sizes=(20000003,) * 16,
        ),
    )
