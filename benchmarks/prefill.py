r"""Reads one random prompt several times through real worker processes and prints what each stage did.

    PYTHONPATH=.types python -P benchmarks/prefill.py CONFIG MODEL.gguf --tokens 32768 --runs 3 \
        [--set key=value] [--nothing-resident]

The first run compiles kernels and is printed apart. --nothing-resident gives every stage just the budget that
it needs besides its expert cache. One JSON object a run on stdout.
"""

import argparse
import json
import random
from pathlib import Path

from strata_coord.coordinator.config import Config, load_config
from strata_coord.coordinator.engine import Engine, Supervision
from strata_coord.coordinator.model_index import ModelIndex, load_model_index
from strata_coord.coordinator.plan import LaunchPlan
from strata_coord.coordinator.planner import plan_launch
from strata_coord.coordinator.probe import probe_rig
from strata_coord.coordinator.prompt_planner import plan_prompt
from strata_coord.coordinator.requests import GenerationRequest, TokenGenerated
from strata_coord.ipc.status_page import EventKind

CACHE_LINES = {"expert cache", "free"}
MIB = 1 << 20


def nothing_resident(plan: LaunchPlan) -> list[str]:
    """Overrides that leave no room for an expert cache."""
    overrides = []
    for stage in plan.stages:
        needed = sum(line.num_bytes for line in stage.lines if line.name not in CACHE_LINES)
        overrides.append(f"stage.{stage.stage}.vram_budget_mib={needed // MIB + 2}")
    return overrides


def read_prompt(engine: Engine, plan: LaunchPlan, mode: str, ids: tuple[int, ...]) -> dict[str, object]:
    """Read ids once; returns times and bytes of every stage."""
    prompt_plan = plan_prompt(plan, len(ids), mode=mode)
    seen = {stage: count for stage, (count, _) in enumerate(engine.new_spans({}))}
    generation = engine.submit(GenerationRequest(prompt_ids=ids, max_tokens=8), prompt_plan)
    elapsed = [event.elapsed_s for event in generation.events() if isinstance(event, TokenGenerated)]
    figures = generation.figures
    if figures is None:
        message = "the prompt was not read"
        raise RuntimeError(message)
    halves = []
    for _, spans in engine.new_spans(seen):
        halves.append(
            {
                kind.name.lower(): sum(
                    span.end_ns - span.start_ns for span in spans if span.kind == kind and span.value > 8
                )
                / 1e9
                for kind in (EventKind.ATTENTION_HALF, EventKind.EXPERT_HALF)
            }
        )
    return {
        "ttft_s": figures.ttft_s,
        "tokens_per_s": len(ids) / figures.ttft_s,
        "decode_tokens_per_s": (len(elapsed) - 1) / (elapsed[-1] - elapsed[0]),
        "super_chunks": prompt_plan.num_super_chunks,
        "expert_bytes": figures.expert_bytes_moved,
        "expert_gb_per_s": figures.expert_bytes_moved / figures.ttft_s / 1e9,
        "stages": [
            {
                "busy_s": clock.busy_ns / 1e9,
                "wait_rows_s": clock.wait_rows_ns / 1e9,
                "wait_experts_s": clock.wait_experts_ns / 1e9,
                "hand_off_s": clock.hand_off_ns / 1e9,
                **half,
            }
            for clock, half in zip(figures.clocks, halves, strict=True)
        ],
    }


def planned(arguments: argparse.Namespace) -> tuple[Config, ModelIndex, LaunchPlan]:
    """Configuration, model and plan as launch makes them."""
    model = load_model_index(arguments.model)
    config = load_config(arguments.config, arguments.overrides, model=str(arguments.model))
    plan = plan_launch(model, probe_rig(), config)
    if arguments.nothing_resident:
        overrides = [*arguments.overrides, *nothing_resident(plan)]
        config = load_config(arguments.config, overrides, model=str(arguments.model))
        plan = plan_launch(model, probe_rig(), config)
    return config, model, plan


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--mode", default="layer-major")
    parser.add_argument("--set", dest="overrides", action="append", default=[])
    parser.add_argument("--nothing-resident", action="store_true")
    arguments = parser.parse_args()
    _config, model, plan = planned(arguments)
    draw = random.Random(1)
    limit = model.geometry.num_real_tokens
    engine = Engine(plan=plan, model=model, supervision=Supervision())
    engine.start()
    try:
        for run in range(arguments.runs):
            ids = tuple(draw.randrange(limit) for _ in range(arguments.tokens))
            print(json.dumps({"run": run, **read_prompt(engine, plan, arguments.mode, ids)}), flush=True)
    finally:
        engine.close()


if __name__ == "__main__":
    main()
