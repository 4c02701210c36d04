import math
import re
from collections.abc import Callable
from pathlib import Path

import handmade_gguf as made
import pytest

from strata_coord.coordinator import model_tensors
from strata_coord.coordinator.model_geometry import FAMILIES
from strata_coord.coordinator.model_index import ModelIndex, load_model_index
from strata_coord.ipc.errors import ModelError

Model = tuple[dict[str, object], dict[str, tuple[int, ...]]]
YARN: dict[str, object] = {
    "rope__scaling__type": "yarn",
    "rope__scaling__factor": 4.0,
    "rope__scaling__original_context_length": 64,
}


def load(tmp_path: Path, model: Model) -> ModelIndex:
    return load_model_index(made.write_model(tmp_path / "m.gguf", *model))


def refusal(tmp_path: Path, model: Model) -> str:
    with pytest.raises(ModelError) as info:
        load(tmp_path, model)
    message = str(info.value)
    assert message.startswith(str(tmp_path / "m.gguf"))
    assert message.isprintable()
    return message


def changed(build: Callable[[], Model], **keys: object) -> Model:
    """A model with keys replaced (under its prefix, "__" for a dot), or removed where the value is None."""
    values, shapes = build()
    prefix = str(values["general.architecture"])
    for name, value in keys.items():
        full = f"{prefix}.{name.replace('__', '.')}"
        if value is None:
            values.pop(full, None)
        else:
            values[full] = value
    return values, shapes


# --- geometry -------------------------------------------------------------------------------------------


def test_the_geometry_of_qwen3moe(tmp_path: Path) -> None:
    geometry = load(tmp_path, made.qwen3moe()).geometry
    assert (geometry.num_layers, geometry.hidden_size, geometry.vocabulary_size) == (2, 32, 24)
    assert geometry.num_real_tokens == 24
    assert geometry.recurrent_layers == (False, False)
    assert geometry.row_width == 32
    attention = geometry.attention
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (4, 2, 8)
    assert (attention.rope_dims, attention.rope_base, attention.gated) == (8, 1e6, False)
    assert geometry.experts.widths == (16, 16)
    assert geometry.experts.shared_width == 0
    assert geometry.delta_net is None
    assert geometry.hyper_connections is None
    assert geometry.sparse_attention is None
    assert geometry.ngram is None


def test_the_geometry_of_qwen4exp(tmp_path: Path) -> None:
    geometry = load(tmp_path, made.qwen4exp()).geometry
    assert geometry.recurrent_layers == (True, True, True, False)
    assert geometry.row_width == 128
    assert geometry.attention.gated
    assert geometry.attention.rope_dims == 4
    assert geometry.experts.shared_width == 24
    net = geometry.delta_net
    assert net is not None
    assert (net.num_key_heads, net.num_value_heads, net.head_dim, net.conv_kernel) == (2, 6, 8, 4)
    assert (net.head_order, net.output_gate) == ("tiled", "sigmoid")
    sparse = geometry.sparse_attention
    assert sparse is not None
    assert (sparse.num_heads, sparse.head_dim, sparse.budget_tokens) == (2, 8, 16)
    assert sparse.compress_ratios == (0, 0, 0, 4)
    ngram = geometry.ngram
    assert ngram is not None
    assert (ngram.layers, ngram.ngram_size, ngram.heads_per_ngram, ngram.row_width) == ((1,), 3, 2, 8)
    assert ngram.eos_token == 3


def test_multipliers_stay_exact_unsigned_64_bit_integers(tmp_path: Path) -> None:
    ngram = load(tmp_path, made.qwen4exp()).geometry.ngram
    assert ngram is not None
    assert ngram.multipliers == (1 << 63, (1 << 64) - 1, 1 << 40)


def test_the_recurrent_layers_of_newer_files_win_over_the_interval(tmp_path: Path) -> None:
    model = changed(
        made.qwen4exp, full_attention_interval=2, attention__recurrent_layers=[True, True, True, False]
    )
    assert load(tmp_path, model).geometry.recurrent_layers == (True, True, True, False)


def test_the_interval_defaults_to_four(tmp_path: Path) -> None:
    model = changed(made.qwen4exp, full_attention_interval=None)
    assert load(tmp_path, model).geometry.recurrent_layers == (True, True, True, False)


def test_a_compress_ratio_of_zero_makes_an_attention_layer_dense_without_an_indexer(tmp_path: Path) -> None:
    values, shapes = changed(made.qwen4exp, attention__compress_ratios=[0, 0, 0, 0])
    shapes = {name: shape for name, shape in shapes.items() if "indexer" not in name}
    index = load(tmp_path, (values, shapes))
    assert index.geometry.sparse_attention is not None
    assert index.geometry.sparse_attention.compress_ratios == (0, 0, 0, 0)
    assert not any("indexer" in tensor.name for tensor in index.layer_tensors(3))


def test_the_indexer_of_a_dense_layer_is_not_read(tmp_path: Path) -> None:
    index = load(tmp_path, changed(made.qwen4exp, attention__compress_ratios=[0, 0, 0, 0]))
    assert not any(
        "indexer" in tensor.name for tensor in index.stage_tensors(0, 4, is_first=True, is_last=True)
    )


def test_expert_widths_may_differ_by_layer(tmp_path: Path) -> None:
    values, shapes = changed(made.qwen3moe, expert_feed_forward_length=[16, 48])
    shapes |= {
        "blk.1.ffn_gate_exps.weight": (4, 48, 32),
        "blk.1.ffn_up_exps.weight": (4, 48, 32),
        "blk.1.ffn_down_exps.weight": (4, 32, 48),
    }
    index = load(tmp_path, (values, shapes))
    assert index.geometry.experts.widths == (16, 48)
    assert index.expert_blob_bytes(1) == 3 * index.expert_blob_bytes(0)


def test_an_absent_expert_width_is_that_of_the_tensors(tmp_path: Path) -> None:
    index = load(tmp_path, changed(made.qwen3moe, expert_feed_forward_length=None))
    assert index.geometry.experts.widths == (16, 16)


def test_blocks_past_the_trunk_are_left_out(tmp_path: Path) -> None:
    values, shapes = changed(made.qwen3moe, block_count=3, nextn_predict_layers=1)
    shapes |= {"blk.2.nextn.eh_proj.weight": (32, 64), "blk.2.attn_norm.weight": (32,)}
    index = load(tmp_path, (values, shapes))
    assert index.geometry.num_layers == 2
    assert not any(name.startswith("blk.2.") for name in index.tensors)


def test_yarn_has_the_defaults_of_the_models_own_code(tmp_path: Path) -> None:
    yarn = load(tmp_path, changed(made.qwen3moe, **YARN)).geometry.attention.yarn
    assert yarn is not None
    assert (yarn.factor, yarn.original_tokens, yarn.beta_fast, yarn.beta_slow) == (4.0, 64, 32.0, 1.0)
    assert yarn.magnitude == pytest.approx(0.1 * math.log(4.0) + 1.0)


@pytest.mark.parametrize(("stated", "expected"), [(64, 256), (128, 256), (1024, 1024)])
def test_yarn_stretches_the_context_that_the_file_states(tmp_path: Path, stated: int, expected: int) -> None:
    assert (
        load(tmp_path, changed(made.qwen3moe, **YARN, context_length=stated)).geometry.context_tokens
        == expected
    )


def test_a_file_without_scaling_has_no_yarn(tmp_path: Path) -> None:
    assert load(tmp_path, made.qwen3moe()).geometry.attention.yarn is None


def test_a_stated_magnitude_of_yarn_replaces_the_default(tmp_path: Path) -> None:
    keys = YARN | {"rope__scaling__yarn_attn_factor": 1.5, "rope__scaling__yarn_beta_fast": 16.0}
    yarn = load(tmp_path, changed(made.qwen3moe, **keys)).geometry.attention.yarn
    assert yarn is not None
    assert (yarn.magnitude, yarn.beta_fast) == (1.5, 16.0)


def test_the_trailing_run_of_unused_tokens_is_not_real(tmp_path: Path) -> None:
    values, shapes = made.qwen3moe()
    values["tokenizer.ggml.tokens"] = [f"t{index}" for index in range(24)]
    values["tokenizer.ggml.token_type"] = [1, 5, 1, 3] + [1] * 16 + [5] * 4
    assert load(tmp_path, (values, shapes)).geometry.num_real_tokens == 20


# --- tensors --------------------------------------------------------------------------------------------


def test_expert_tensors_come_in_blob_order(tmp_path: Path) -> None:
    index = load(tmp_path, made.qwen3moe())
    names = [tensor.name for tensor in index.expert_tensors(1)]
    assert names == ["blk.1.ffn_gate_exps.weight", "blk.1.ffn_up_exps.weight", "blk.1.ffn_down_exps.weight"]
    assert index.expert_blob_bytes(1) == 3 * 16 * 32 * 4


def test_fused_gate_and_up_are_accepted(tmp_path: Path) -> None:
    values, shapes = made.qwen3moe()
    del shapes["blk.0.ffn_gate_exps.weight"], shapes["blk.0.ffn_up_exps.weight"]
    shapes["blk.0.ffn_gate_up_exps.weight"] = (4, 32, 32)
    index = load(tmp_path, (values, shapes))
    assert [tensor.name for tensor in index.expert_tensors(0)] == [
        "blk.0.ffn_gate_up_exps.weight",
        "blk.0.ffn_down_exps.weight",
    ]
    assert index.expert_blob_bytes(0) == index.expert_blob_bytes(1)


def test_fused_query_key_value_is_accepted(tmp_path: Path) -> None:
    values, shapes = made.qwen3moe()
    for part in "qkv":
        del shapes[f"blk.0.attn_{part}.weight"]
    shapes["blk.0.attn_qkv.weight"] = (64, 32)
    assert "blk.0.attn_qkv.weight" in {
        tensor.name for tensor in load(tmp_path, (values, shapes)).layer_tensors(0)
    }


def test_a_vector_may_be_written_as_one_row(tmp_path: Path) -> None:
    values, shapes = made.qwen4exp()
    shapes["blk.2.ffn_gate_inp_shexp.weight"] = (1, 32)
    load(tmp_path, (values, shapes))


def test_layer_bytes_add_up_to_the_file(tmp_path: Path) -> None:
    index = load(tmp_path, made.qwen4exp())
    table = index.ngram_table()
    assert table is not None
    parts = [index.dense_bytes(layer) + 4 * index.expert_blob_bytes(layer) for layer in range(4)]
    rest = [index.embedding(), table, *index.head_tensors()]
    total = sum(parts) + sum(tensor.num_bytes for tensor in rest)
    assert total == sum(tensor.num_bytes for tensor in index.tensors.values())


def test_two_stages_share_the_file_without_overlap(tmp_path: Path) -> None:
    index = load(tmp_path, made.qwen4exp())
    first = {tensor.name for tensor in index.stage_tensors(0, 2, is_first=True, is_last=False)}
    last = {tensor.name for tensor in index.stage_tensors(2, 4, is_first=False, is_last=True)}
    assert first | last == set(index.tensors)
    assert not first & last
    assert {"token_embd.weight", "per_layer_token_embd.weight", "blk.1.ple_key.weight"} <= first
    assert {"output.weight", "output_hc_up.weight"} <= last


def test_the_ngram_table_goes_to_the_stage_of_its_layer(tmp_path: Path) -> None:
    index = load(tmp_path, made.qwen4exp())
    assert "per_layer_token_embd.weight" not in {
        t.name for t in index.stage_tensors(0, 1, is_first=True, is_last=False)
    }
    assert "per_layer_token_embd.weight" in {
        t.name for t in index.stage_tensors(1, 4, is_first=False, is_last=True)
    }


def test_a_tied_embedding_goes_to_both_ends_and_once_to_a_single_stage(tmp_path: Path) -> None:
    values, shapes = made.qwen3moe()
    del shapes["output.weight"]
    index = load(tmp_path, (values, shapes))
    assert index.tied
    assert index.output() == index.embedding()
    for first, last, ends in ((0, 1, (True, False)), (1, 2, (False, True)), (0, 2, (True, True))):
        names = [t.name for t in index.stage_tensors(first, last, is_first=ends[0], is_last=ends[1])]
        assert names.count("token_embd.weight") == 1


def test_a_layer_may_straddle_two_shards(tmp_path: Path) -> None:
    keys, shapes = made.qwen3moe()
    names = list(shapes)
    cut = names.index("blk.1.ffn_up_exps.weight")
    split = {"split.count": 2, "split.tensors.count": len(names)}
    first = made.write_model(
        tmp_path / "m-00001-of-00002.gguf",
        keys | split | {"split.no": 0},
        {n: shapes[n] for n in names[:cut]},
    )
    made.write_model(
        tmp_path / "m-00002-of-00002.gguf", split | {"split.no": 1}, {n: shapes[n] for n in names[cut:]}
    )
    index = load_model_index(first)
    assert [tensor.file for tensor in index.expert_tensors(1)] == [0, 1, 1]
    assert index.path == str(first)


# --- refusals -------------------------------------------------------------------------------------------


def test_an_unsupported_architecture_names_the_supported_ones(tmp_path: Path) -> None:
    values, shapes = made.qwen3moe()
    values["general.architecture"] = "lla\x1bma"
    message = refusal(tmp_path, (values, shapes))
    assert f'"lla\\x1bma" is not supported; supported are {", ".join(FAMILIES)}' in message


@pytest.mark.parametrize(
    ("build", "keys", "expected"),
    [
        (made.qwen3moe, {"block_count": None}, "block_count: missing"),
        (made.qwen3moe, {"block_count": 0}, "0 is outside 1 to 1024"),
        (made.qwen3moe, {"block_count": 1_025}, "1025 is outside 1 to 1024"),
        (made.qwen3moe, {"block_count": "two"}, 'block_count: "two", expected an integer'),
        (made.qwen3moe, {"nextn_predict_layers": 2}, "2 is outside 0 to 1"),
        (made.qwen3moe, {"expert_count": 4_097}, "4097 is outside 1 to 4096"),
        (made.qwen3moe, {"expert_used_count": 5}, "5 is outside 1 to 4"),
        (made.qwen3moe, {"attention__head_count_kv": 3}, "3 does not divide head_count 4"),
        (made.qwen3moe, {"attention__value_length": 16}, "16, expected key_length 8"),
        (made.qwen3moe, {"rope__dimension_count": 7}, "7 is odd"),
        (made.qwen3moe, {"rope__freq_base": float("nan")}, "nan is outside"),
        (made.qwen3moe, {"rope__scaling__type": "linear"}, '"linear" is not supported'),
        (made.qwen3moe, {"rope__scaling__type": "yarn"}, "rope.scaling.factor: missing"),
        (made.qwen3moe, YARN | {"rope__scaling__factor": 0.5}, "0.5 is outside 1.0 to"),
        (made.qwen3moe, YARN | {"rope__scaling__original_context_length": None}, "length: missing"),
        (
            made.qwen3moe,
            YARN | {"rope__scaling__yarn_ext_factor": 0.5},
            "0.5 is not supported; supported is 1",
        ),
        (made.qwen3moe, YARN | {"rope__scaling__yarn_log_multiplier": 0.1}, "yarn_log_multiplier: 0.1"),
        (made.qwen3moe, YARN | {"rope__scaling__yarn_beta_slow": 64.0}, "64.0, above yarn_beta_fast 32.0"),
        (made.qwen3moe, YARN | {"rope__freq_base": 1.0}, "YaRN has no slow and fast rotations"),
        (made.qwen3moe, {"attention__layer_norm_rms_epsilon": float("inf")}, "inf is outside"),
        (made.qwen3moe, {"expert_feed_forward_length": [16, 16, 16]}, "3 elements, expected 2"),
        (
            made.qwen3moe,
            {"expert_feed_forward_length": 17},
            "tensor blk.0.ffn_gate_exps.weight: shape [4, 16, 32]",
        ),
        (made.qwen3moe, {"expert_count": 8}, "tensor blk.0.ffn_gate_inp.weight: shape [4, 32]"),
        (made.qwen3moe, {"embedding_length": 64}, "tensor token_embd.weight: shape [24, 32]"),
        (made.qwen3moe, {"attention__head_count": 2}, "tensor blk.0.attn_q.weight: shape [32, 32]"),
        (made.qwen4exp, {"attention__recurrent_layers": [True, False]}, "2 elements, expected 4"),
        (made.qwen4exp, {"ssm__inner_size": 40}, "40, expected time_step_rank x state_size = 48"),
        (made.qwen4exp, {"ssm__time_step_rank": 5}, "5 is not a multiple of group_count 2"),
        (made.qwen4exp, {"attention__compress_ratios": [0, 0, 0, 3]}, "3 does not divide the budget 16"),
        (made.qwen4exp, {"attention__compress_ratios": None}, "compress_ratios: missing"),
        (made.qwen4exp, {"ple__layers": [1, 2]}, "2 layers, supported is 1"),
        (made.qwen4exp, {"ple__layers": [4]}, "4 is outside 0 to 3"),
        (made.qwen4exp, {"ple__head_offsets": [0, 11, 24]}, "3 elements, expected 4"),
        (made.qwen4exp, {"ple__head_vocab_sizes": [11, 0, 17, 19]}, "0 is outside 1"),
        (made.qwen4exp, {"ple__head_offsets": [0, 11, 24, 60]}, "64 rows, the heads reach row 78"),
        (made.qwen4exp, {"ple__head_offsets": [(1 << 64) - 1, 0, 11, 24]}, "64 rows, the heads reach row"),
        (made.qwen4exp, {"ple__eos_token_id": 24}, "24 is outside 0 to 23"),
        (
            made.qwen4exp,
            {"embedding_length_per_layer_input": 4},
            "blk.1.ple_key.weight: shape [128, 32], the metadata asks for [128, 16]",
        ),
        (made.qwen4exp, {"hyper_connection__count": 2}, "tensor output_hc_norm.weight: shape [128]"),
    ],
)
def test_keys_that_are_out_of_range_or_contradict_the_tensors_are_refused(
    tmp_path: Path, build: Callable[[], Model], keys: dict, expected: str
) -> None:
    assert expected in refusal(tmp_path, changed(build, **keys))


def test_missing_tensors_are_listed_five_at_most(tmp_path: Path) -> None:
    values, shapes = made.qwen3moe()
    del shapes["blk.1.ffn_up_exps.weight"]
    assert refusal(tmp_path, (values, shapes)).endswith("tensors: 1 missing: blk.1.ffn_up_exps.weight")
    shapes = {name: shape for name, shape in shapes.items() if not name.startswith("blk.1.")}
    assert re.search(
        r"12 missing: (blk\.1\.\S+ ){5}and 7 more$", refusal(tmp_path, (values, shapes)).replace(",", "")
    )


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("v.blk.0.attn_q.weight", "tensor v.blk.0.attn_q.weight: images are not supported"),
        ("mm.0.weight", "tensor mm.0.weight: images are not supported"),
        ("blk.1.ffn_gate_exps.scale", "tensor blk.1.ffn_gate_exps.scale: per-tensor scales (NVFP4)"),
        ("blk.1.attn_q.input_scale", "tensor blk.1.attn_q.input_scale: per-tensor scales (NVFP4)"),
        ("blk.0.attn_q.bias", "tensors: 1 that this architecture does not have: blk.0.attn_q.bias"),
        ("rope_\x1bfreqs.weight", "1 that this architecture does not have: rope_\\x1bfreqs.weight"),
    ],
)
def test_a_tensor_that_would_be_left_out_is_refused_by_name(tmp_path: Path, name: str, expected: str) -> None:
    values, shapes = made.qwen3moe()
    assert expected in refusal(tmp_path, (values, shapes | {name: (32,)}))


def test_unused_tensors_are_listed_five_at_most(tmp_path: Path) -> None:
    values, shapes = made.qwen3moe()
    extra = {f"blk.0.extra{number}.weight": (32,) for number in range(7)}
    message = refusal(tmp_path, (values, shapes | extra))
    assert message.endswith("blk.0.extra4.weight and 2 more")
    assert "7 that this architecture does not have" in message


def test_scales_of_blocks_past_the_trunk_do_not_matter(tmp_path: Path) -> None:
    values, shapes = changed(made.qwen3moe, block_count=3, nextn_predict_layers=1)
    assert load(tmp_path, (values, shapes | {"blk.2.attn_q.scale": (1,)})).geometry.num_layers == 2


def test_a_model_without_an_embedding_is_refused(tmp_path: Path) -> None:
    values, shapes = made.qwen3moe()
    del shapes["token_embd.weight"]
    assert "token_embd.weight: missing" in refusal(tmp_path, (values, shapes))


def test_the_token_list_has_one_entry_per_row(tmp_path: Path) -> None:
    values, shapes = made.qwen3moe()
    values["tokenizer.ggml.tokens"] = ["a", "b"]
    assert "tokenizer.ggml.tokens: 2 tokens, token_embd.weight has 24 rows" in refusal(
        tmp_path, (values, shapes)
    )


def test_a_type_that_no_kernel_expands_is_refused_with_its_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_tensors, "WEIGHT_TYPES", model_tensors.WEIGHT_TYPES - {"F32"})
    message = refusal(tmp_path, made.qwen3moe())
    assert "tensor token_embd.weight: type F32 is not supported" in message
    assert "supported are BF16, F16, IQ1_M" in message


def test_integer_types_are_not_weights(tmp_path: Path) -> None:
    path = made.write_model(tmp_path / "m.gguf", *made.qwen3moe())
    record = made.string("output_norm.weight") + made.scalar(made.U32, 1) + made.scalar(made.U64, 32)
    data = path.read_bytes()
    at = data.index(record) + len(record)
    path.write_bytes(data[:at] + made.scalar(made.U32, 26) + data[at + 4 :])
    with pytest.raises(ModelError, match=r"output_norm\.weight: type I32 is not a type of weights"):
        load_model_index(path)
