"""The plan as text for a terminal: stages, budgets, candidates, reasons. Draws, and decides nothing.

rich is imported inside, so that commands which draw nothing do not load it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from strata_coord.coordinator.plan import LaunchPlan, PromptPlan, StagePlan

__all__ = ["render_launch", "render_prompt"]

_MIB = 1 << 20


def render_launch(plan: LaunchPlan) -> RenderableType:
    """Return the launch plan: stages, budget by purpose in MiB, sizes, notes."""
    from rich.console import Group
    from rich.text import Text

    sizes = (
        f"{plan.architecture}, {plan.num_layers} layers, {plan.num_experts} experts a layer, "
        f"{plan.experts_per_token} per token\n"
        f"S up to {plan.super_chunk_tokens}, c {plan.sub_chunk_tokens}, "
        f"{plan.hand_off_slots} hand-off slots of {plan.slot_rows} rows\n"
        f"context {plan.context_tokens}, key-value pool {plan.kv_pool_tokens} tokens in {plan.kv_dtype}, "
        f"{plan.max_sequences} sequences"
    )
    notes = [Text(f"- {note}") for note in plan.notes]
    return Group(Text(sizes), _stage_table(plan), _budget_table(plan), *notes)


def render_prompt(plan: PromptPlan) -> RenderableType:
    """Return the prompt plan: the choice, its reason, and the predicted time of every candidate."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(title="Candidates", title_justify="left")
    table.add_column("mode", overflow="fold")
    for name in ("S", "parts", "s"):
        table.add_column(name, justify="right", overflow="fold")
    table.add_column("verdict", overflow="fold")
    for candidate in plan.candidates:
        table.add_row(
            candidate.mode,
            str(candidate.super_chunk_tokens),
            str(candidate.num_super_chunks),
            f"{candidate.predicted_ttft_s:.3f}",
            Text(candidate.declined or "chosen"),
        )
    facts = (
        f"prompt of {plan.prompt_tokens} tokens: {plan.reason}\n"
        f"upload {plan.upload}, {plan.predicted_expert_bytes / _MIB:.1f} MiB of experts predicted to move, "
        f"hand-offs of {plan.slot_rows} rows"
    )
    return Group(Text(facts), table)


def _stage_table(plan: LaunchPlan) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(title="Stages", title_justify="left")
    for name in (
        "stage",
        "layers",
        "device",
        "node",
        "threads",
        "resident",
        "arena MiB",
        "file MiB",
        "window",
    ):
        table.add_column(name, justify="right", overflow="fold")
    for stage in plan.stages:
        num_experts = (stage.last_layer - stage.first_layer) * plan.num_experts
        table.add_row(
            str(stage.stage),
            f"{stage.first_layer}-{stage.last_layer - 1}",
            Text(stage.device),
            "-" if stage.numa_node < 0 else str(stage.numa_node),
            str(stage.cpu_threads),
            f"{stage.num_resident}/{num_experts}",
            _mib(stage.arena_bytes),
            _mib(stage.streamed_bytes - stage.arena_bytes),
            str(stage.window_slots),
        )
    return table


def _budget_table(plan: LaunchPlan) -> Table:
    from rich.table import Table

    table = Table(title="Device memory, MiB", title_justify="left")
    table.add_column("purpose", overflow="fold")
    for stage in plan.stages:
        table.add_column(f"stage {stage.stage}", justify="right", overflow="fold")
    for number, line in enumerate(plan.stages[0].lines):
        table.add_row(line.name, *(_line_mib(stage, number) for stage in plan.stages))
    table.add_section()
    table.add_row("budget", *(_mib(stage.budget_bytes) for stage in plan.stages))
    return table


def _line_mib(stage: StagePlan, number: int) -> str:
    return _mib(stage.lines[number].num_bytes)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / _MIB:.1f}"
