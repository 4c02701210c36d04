"""Headers of llama, glm4moe and gpt-oss: what their keys and tensors say, and what is refused."""

from pathlib import Path

import handmade_gguf as made
import pytest
from planning_fakes import fake_config, fake_model, fake_rig

from strata_coord.coordinator.budget import ExpertRoom, StageShape, divide_expert_room
from strata_coord.coordinator.inspect_model import inspect
from strata_coord.coordinator.model_index import ModelIndex, load_model_index
from strata_coord.coordinator.planner import plan_launch
from strata_coord.ipc.errors import ModelError

Keys = dict[str, object]
Shapes = dict[str, tuple[int, ...]]


def changed(name: str, keys: Keys, *, layers: int = 2, second_norm: str = "ffn_norm") -> tuple[Keys, Shapes]:
    """The small qwen3moe model under another name, without head norms."""
    old_keys, shapes = made.qwen3moe()
    new_keys = {key.replace("qwen3moe.", f"{name}."): value for key, value in old_keys.items()}
    new_keys |= {"general.architecture": name, f"{name}.block_count": layers}
    new_keys |= {f"{name}.{key}": value for key, value in keys.items()}
    shapes = {
        key.replace("ffn_norm", second_norm): shape
        for key, shape in shapes.items()
        if "attn_q_norm" not in key and "attn_k_norm" not in key
    }
    return new_keys, shapes


def single_experts(shapes: Shapes) -> Shapes:
    """Each stacked tensor as one tensor for each expert."""
    single: Shapes = {}
    for name, shape in shapes.items():
        if "_exps" in name:
            single |= {name.replace("_exps", f".{expert}"): shape[1:] for expert in range(shape[0])}
        else:
            single[name] = shape
    return single


def glm4moe(**keys: object) -> tuple[Keys, Shapes]:
    """One layer without experts, then one with a shared expert as wide as two."""
    values, shapes = changed(
        "glm4moe",
        {
            "leading_dense_block_count": 1,
            "feed_forward_length": 40,
            "expert_shared_count": 2,
            "expert_gating_func": 2,
            "expert_weights_scale": 1.5,
            "expert_weights_norm": True,
            "rope.dimension_count": 4,
        }
        | keys,
        second_norm="post_attention_norm",
    )
    shapes = {name: shape for name, shape in shapes.items() if not name.startswith("blk.0.ffn_")}
    shapes |= {"blk.1.exp_probs_b.bias": (4,)}
    for layer, suffix, width in ((0, "", 40), (1, "_shexp", 32)):
        shapes |= {
            f"blk.{layer}.ffn_gate{suffix}.weight": (width, 32),
            f"blk.{layer}.ffn_up{suffix}.weight": (width, 32),
            f"blk.{layer}.ffn_down{suffix}.weight": (32, width),
        }
    return values, shapes


def gpt_oss(**keys: object) -> tuple[Keys, Shapes]:
    values, shapes = changed(
        "gpt-oss", {"attention.sliding_window": 16} | keys, second_norm="post_attention_norm"
    )
    for layer in range(2):
        biases = {
            "attn_q.bias": (32,),
            "attn_k.bias": (16,),
            "attn_v.bias": (16,),
            "attn_output.bias": (32,),
            "attn_sinks.weight": (4,),
            "ffn_gate_inp.bias": (4,),
            "ffn_gate_exps.bias": (4, 16),
            "ffn_up_exps.bias": (4, 16),
            "ffn_down_exps.bias": (4, 32),
        }
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in biases.items()}
    return values, shapes


def load(tmp_path: Path, model: tuple[Keys, Shapes]) -> ModelIndex:
    return load_model_index(made.write_model(tmp_path / "m.gguf", *model))


def test_llama_rotates_neighbours_and_takes_its_width_from_the_tensors(tmp_path: Path) -> None:
    keys, shapes = changed("llama", {})
    del keys["llama.expert_feed_forward_length"]
    geometry = load(tmp_path, (keys, shapes)).geometry
    assert geometry.attention.rope_pairs == "neighbours"
    assert not geometry.attention.head_norms
    assert not geometry.attention.projection_biases
    assert geometry.experts.widths == (16, 16)
    assert (geometry.experts.scores, geometry.experts.renormalised) == ("softmax", True)


def test_experts_in_a_tensor_each_are_as_large_as_stacked_ones(tmp_path: Path) -> None:
    keys, shapes = changed("llama", {})
    stacked = load(tmp_path, (keys, shapes))
    del keys["llama.expert_feed_forward_length"]
    single = load(tmp_path, (keys, single_experts(shapes)))
    assert single.geometry.experts.widths == (16, 16)
    assert single.expert_blob_bytes(1) == stacked.expert_blob_bytes(1) == 3 * 16 * 32 * 4
    assert [tensor.name for tensor in single.expert_tensors(1)[::4]] == [
        "blk.1.ffn_gate.0.weight",
        "blk.1.ffn_up.0.weight",
        "blk.1.ffn_down.0.weight",
    ]
    report = inspect(tmp_path / "m.gguf")
    assert report["layers"][1]["expert_types"] == ["F32", "F32", "F32"]


def test_a_missing_single_expert_is_named(tmp_path: Path) -> None:
    keys, shapes = changed("llama", {})
    shapes = single_experts(shapes)
    del shapes["blk.1.ffn_up.2.weight"]
    with pytest.raises(ModelError, match=r"missing: blk\.1\.ffn_gate_exps\.weight, blk\.1\.ffn_up_exps"):
        load(tmp_path, (keys, shapes))


def test_a_llama_without_experts_misses_its_expert_count(tmp_path: Path) -> None:
    keys, shapes = changed("llama", {})
    del keys["llama.expert_count"]
    with pytest.raises(ModelError, match=r"llama\.expert_count: missing"):
        load(tmp_path, (keys, shapes))


def test_rotations_scaled_by_a_tensor_are_refused(tmp_path: Path) -> None:
    keys, shapes = changed("llama", {})
    with pytest.raises(ModelError, match=r"rope_freqs\.weight: rotations scaled by a tensor"):
        load(tmp_path, (keys, shapes | {"rope_freqs.weight": (4,)}))


def test_the_router_of_glm4moe_is_read_from_its_keys(tmp_path: Path) -> None:
    index = load(tmp_path, glm4moe())
    experts = index.geometry.experts
    assert experts.widths == (0, 16)
    assert (experts.dense_width, experts.shared_width, experts.shared_gate) == (40, 32, False)
    assert (experts.scores, experts.selection_bias) == ("sigmoid", True)
    assert (experts.weight_scale, experts.renormalised) == (1.5, True)
    assert (experts.groups, experts.groups_used) == (1, 1)
    assert index.geometry.attention.rope_dims == 4
    assert index.expert_tensors(0) == ()
    assert index.expert_blob_bytes(0) == 0
    assert index.expert_blob_bytes(1) == 3 * 16 * 32 * 4


def test_keys_that_glm4moe_leaves_out_have_their_defaults(tmp_path: Path) -> None:
    keys, shapes = glm4moe()
    for name in ("expert_gating_func", "expert_weights_scale", "expert_weights_norm"):
        del keys[f"glm4moe.{name}"]
    experts = load(tmp_path, (keys, shapes)).geometry.experts
    assert (experts.scores, experts.weight_scale, experts.renormalised) == ("sigmoid", 1.0, False)


def test_head_norms_and_biases_of_glm4moe_are_optional(tmp_path: Path) -> None:
    keys, shapes = glm4moe()
    assert not load(tmp_path, (keys, shapes)).geometry.attention.head_norms
    for layer in range(2):
        shapes |= {f"blk.{layer}.attn_{part}_norm.weight": (8,) for part in "qk"}
        sizes = {"q": 32, "k": 16, "v": 16}
        shapes |= {f"blk.{layer}.attn_{part}.bias": (size,) for part, size in sizes.items()}
    attention = load(tmp_path, (keys, shapes)).geometry.attention
    assert attention.head_norms
    assert attention.projection_biases


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"leading_dense_block_count": 2}, "2 is outside 0 to 1"),
        ({"expert_gating_func": 3}, "expert_gating_func: 3 is not supported; supported are 1 softmax, 2"),
        ({"expert_weights_norm": 1}, "expert_weights_norm: 1, expected true or false"),
        ({"expert_group_count": 3}, "expert_group_count: 3 does not divide expert_count 4"),
        ({"expert_group_count": 4, "expert_group_used_count": 1}, "1 groups hold fewer than expert_used"),
        ({"expert_group_used_count": 2}, "2 is outside 0 to 1"),
        ({"expert_shared_count": 1}, "tensor blk.1.ffn_gate_shexp.weight: shape [32, 32]"),
    ],
)
def test_router_keys_out_of_range_are_refused(tmp_path: Path, keys: Keys, expected: str) -> None:
    with pytest.raises(ModelError) as info:
        load(tmp_path, glm4moe(**keys))
    assert expected in str(info.value)


def test_every_other_layer_of_gpt_oss_has_a_window(tmp_path: Path) -> None:
    geometry = load(tmp_path, gpt_oss()).geometry
    attention = geometry.attention
    assert attention.windows == (16, 0)
    assert (attention.sinks, attention.output_bias, attention.projection_biases) == (True, True, True)
    experts = geometry.experts
    assert (experts.activation, experts.biases, experts.router_bias) == ("clamped-swiglu", True, True)
    layers = inspect(tmp_path / "m.gguf")["layers"]
    assert [layer["mixer"] for layer in layers] == ["attention over 16 tokens", "attention"]


@pytest.mark.parametrize(("pattern", "windows"), [(1, (0, 0)), (3, (16, 16)), ([False, True], (0, 16))])
def test_the_pattern_says_which_layers_have_a_window(
    tmp_path: Path, pattern: object, windows: tuple[int, ...]
) -> None:
    model = gpt_oss(**{"attention.sliding_window_pattern": pattern})
    assert load(tmp_path, model).geometry.attention.windows == windows


def test_only_the_ramp_of_gpt_oss_may_end_between_pairs(tmp_path: Path) -> None:
    yarn = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 32.0,
        "rope.scaling.original_context_length": 64,
    }
    for model, whole in ((gpt_oss(**yarn), False), (changed("llama", yarn), True)):
        found = load(tmp_path, model).geometry.attention.yarn
        assert found is not None
        assert found.whole_pairs is whole


# --- planning -------------------------------------------------------------------------------------------


def test_layers_without_experts_have_none_in_any_tier() -> None:
    model = fake_model(num_layers=8, context_tokens=2048, widths=(0, 0, 0, 0, 0, 64, 64, 64))
    launch = plan_launch(model, fake_rig(), fake_config(boundaries=(4,), budget_mib=400))
    first, last = launch.stages
    assert first.resident_experts == first.arena_experts == ((),) * 4
    assert (first.resident_bytes, first.streamed_bytes) == (0, 0)
    placed = [len(a) + len(b) for a, b in zip(last.resident_experts, last.arena_experts, strict=True)]
    assert placed == [0, 16, 16, 16]


def test_a_stage_without_experts_keeps_the_smallest_window() -> None:
    shape = StageShape(stage=0, first_layer=0, last_layer=2, is_first=True, is_last=False)
    room = divide_expert_room(
        1000, ranked_bytes=(), ranked_layers=(), num_experts=16, slot_bytes=0, window_slots=None, shape=shape
    )
    assert room == ExpertRoom(window_slots=2, num_resident=0)
