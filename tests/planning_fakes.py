"""Models and rigs for planner tests, made of numbers: no file behind them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strata_coord.coordinator.config import Config, parse_config
from strata_coord.coordinator.planner import plan_launch
from strata_coord.coordinator.rig import ASSUMED_RATES, DeviceFacts, Limits, NodeFacts, Rig
from strata_coord.ipc.assignment import (
    AttentionGeometry,
    DeltaNetGeometry,
    ExpertGeometry,
    HyperConnectionGeometry,
    ModelGeometry,
    NgramGeometry,
    SparseAttentionGeometry,
    TensorExtent,
)

MIB = 1 << 20
_F32, _Q8_0, _Q4_K = 0, 8, 12
_BLOCKS = {_F32: (1, 4), _Q8_0: (32, 34), _Q4_K: (256, 144)}


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeModel:
    """A model with the shapes of the packaged one unless told otherwise."""

    geometry: ModelGeometry
    files: tuple[str, ...] = ("/models/fake.gguf",)

    def layer_tensors(self, layer: int) -> tuple[TensorExtent, ...]:
        hidden = self.geometry.hidden_size
        return (
            _tensor(f"blk.{layer}.attn_q.weight", _Q8_0, (hidden * 2, hidden)),
            _tensor(f"blk.{layer}.attn_output.weight", _Q8_0, (hidden, hidden)),
            _tensor(f"blk.{layer}.ffn_gate_inp.weight", _F32, (self.geometry.experts.num_experts, hidden)),
        )

    def expert_tensors(self, layer: int) -> tuple[TensorExtent, ...]:
        experts, hidden = self.geometry.experts, self.geometry.hidden_size
        count, width = experts.num_experts, experts.widths[layer]
        return (
            _tensor(f"blk.{layer}.ffn_gate_exps.weight", _Q4_K, (count, width, hidden)),
            _tensor(f"blk.{layer}.ffn_up_exps.weight", _Q4_K, (count, width, hidden)),
            _tensor(f"blk.{layer}.ffn_down_exps.weight", _Q8_0, (count, hidden, width)),
        )

    def expert_blob_bytes(self, layer: int) -> int:
        return sum(t.num_bytes for t in self.expert_tensors(layer)) // self.geometry.experts.num_experts

    def dense_bytes(self, layer: int) -> int:
        return sum(tensor.num_bytes for tensor in self.layer_tensors(layer))

    def output(self) -> TensorExtent:
        return _tensor("output.weight", _Q8_0, (self.geometry.vocabulary_size, self.geometry.hidden_size))

    def head_tensors(self) -> tuple[TensorExtent, ...]:
        return (_tensor("output_norm.weight", _F32, (self.geometry.hidden_size,)), self.output())

    def stage_tensors(
        self, first: int, last: int, *, is_first: bool, is_last: bool
    ) -> tuple[TensorExtent, ...]:
        embedding = (_tensor("token_embd.weight", _Q8_0, self.output().shape),) if is_first else ()
        layers = [t for i in range(first, last) for t in (*self.layer_tensors(i), *self.expert_tensors(i))]
        return (*embedding, *layers, *(self.head_tensors() if is_last else ()))


def fake_model(
    *,
    num_layers: int = 48,
    num_experts: int = 16,
    experts_per_token: int = 4,
    hidden_size: int = 256,
    widths: tuple[int, ...] | None = None,
    context_tokens: int = 32768,
    streams: int = 4,
) -> FakeModel:
    """Like qwen4exp: three DeltaNet layers, then one sparse attention layer; four residual streams."""
    recurrent = tuple(layer % 4 != 3 for layer in range(num_layers))
    return FakeModel(
        geometry=ModelGeometry(
            architecture="qwen4exp",
            num_layers=num_layers,
            hidden_size=hidden_size,
            vocabulary_size=2048,
            num_real_tokens=2000,
            context_tokens=context_tokens,
            rms_epsilon=1e-6,
            attention=AttentionGeometry(
                num_heads=4, num_kv_heads=2, head_dim=64, rope_dims=32, rope_base=1e6, gated=True
            ),
            experts=ExpertGeometry(
                num_experts=num_experts,
                experts_per_token=experts_per_token,
                widths=widths or (64,) * num_layers,
                shared_width=64,
            ),
            recurrent_layers=recurrent,
            delta_net=DeltaNetGeometry(
                num_key_heads=2,
                num_value_heads=6,
                head_dim=32,
                conv_kernel=4,
                head_order="grouped",
                output_gate="sigmoid",
            ),
            hyper_connections=HyperConnectionGeometry(num_streams=streams, low_rank=32),
            sparse_attention=SparseAttentionGeometry(
                num_heads=2,
                head_dim=64,
                budget_tokens=512,
                compress_ratios=tuple(0 if one else 4 for one in recurrent),
            ),
            ngram=NgramGeometry(
                layers=(1,),
                ngram_size=3,
                heads_per_ngram=2,
                conv_kernel=4,
                eos_token=0,
                row_width=32,
                multipliers=(1, 3, 5),
                head_offsets=(0, 100, 200, 300),
                head_vocab_sizes=(97, 97, 97, 97),
            ),
        )
    )


def fake_device(device: int = 0, *, free_mib: int = 20_000, **facts: Any) -> DeviceFacts:
    """A card of PCIe 4 x16 with bf16 products, on node 0 unless told otherwise."""
    known: dict[str, Any] = {
        "name": "NVIDIA GeForce RTX 4090",
        "uuid": f"GPU-{device:08x}-0000-0000-0000-000000000000",
        "bus_id": f"0000:{device + 1:02x}:00.0",
        "total_bytes": 24_564 * MIB,
        "free_bytes": free_mib * MIB,
        "compute_capability": (8, 9),
        "link_generation": 1,
        "link_width": 16,
        "max_link_generation": 4,
        "max_link_width": 16,
        "numa_node": 0,
    }
    return DeviceFacts(device=device, **(known | facts))


def fake_rig(
    *,
    cpus: tuple[tuple[int, ...], ...] = ((0, 1),),
    available_bytes: int = 8 << 30,
    devices: tuple[DeviceFacts, ...] = (),
    no_devices: str = "",
) -> Rig:
    """A machine with one NUMA node for each tuple of CPUs."""
    nodes = tuple(NodeFacts(node=n, cpus=own, memory_bytes=16 << 30) for n, own in enumerate(cpus))
    limits = Limits(memory_bytes=None, memlock_bytes=None)
    return Rig(
        name="fake",
        nodes=nodes,
        available_bytes=available_bytes,
        limits=limits,
        rates=ASSUMED_RATES,
        devices=devices,
        no_devices=no_devices,
    )


def fake_config(
    *,
    boundaries: tuple[int, ...] = (24,),
    budget_mib: int | tuple[int, ...] | None = 200,
    stage: str = "",
    prefill: str = "",
    rest: str = "",
    device: str | tuple[str, ...] = "cpu",
    model: str = "",
) -> Config:
    """A checked configuration; stage, model, prefill: TOML lines of those tables; rest: whole tables."""
    count = len(boundaries) + 1
    budgets = budget_mib if isinstance(budget_mib, tuple) else (budget_mib,) * count
    lines = ["" if one is None else f"vram_budget_mib = {one}\n" for one in budgets]
    devices = (device,) * count if isinstance(device, str) else device
    stages = "".join(
        f'[[stage]]\ndevice = "{name}"\n{budget}{stage}\n'
        for name, budget in zip(devices, lines, strict=True)
    )
    text = f'[model]\npath = "fake.gguf"\n{model}\n[split]\nboundaries = {list(boundaries)}\n{stages}\n'
    return parse_config(f"{text}[prefill]\n{prefill}\n{rest}\n", name="fake.toml", folder=Path("/"))


def tight_budgets(
    model: FakeModel, *, resident_share: float, boundaries: tuple[int, ...] = (4,), prefill: str = ""
) -> tuple[int, ...]:
    """MiB for each stage that leave about this share of the experts resident beside a whole window.

    Sizes are those that prefill asks for; what they claim is read off a plan with room for everything.
    """
    roomy = plan_launch(
        model, fake_rig(), fake_config(boundaries=boundaries, budget_mib=1024, prefill=prefill)
    )
    budgets = []
    for stage in roomy.stages:
        lines = {line.name: line.num_bytes for line in stage.lines}
        window = model.geometry.experts.num_experts * (lines["window"] // stage.window_slots)
        claimed = stage.budget_bytes - lines["window"] - lines["expert cache"] - lines["free"]
        budgets.append(-(-int(claimed + window + resident_share * stage.resident_bytes) // MIB))
    return tuple(budgets)


def _tensor(name: str, ggml_type: int, shape: tuple[int, ...]) -> TensorExtent:
    block, num_bytes = _BLOCKS[ggml_type]
    size = math.prod(shape) // block * num_bytes
    return TensorExtent(name=name, file=0, offset_bytes=0, num_bytes=size, ggml_type=ggml_type, shape=shape)
