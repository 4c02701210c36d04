"""LaunchPlan and prompt length -> how that prompt is read. Pure.

Candidates are layer-major with the fewest super-chunks that fit and with more of them, and chunk-major; the
least predicted time wins, ties go to fewer super-chunks. A forced mode is obeyed, and the reason says what it
costs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from strata_coord.coordinator.cost_model import expected_distinct_share, makespan_s, stage_time
from strata_coord.coordinator.plan import Candidate, LaunchPlan, ModeSetting, PrefillMode, PromptPlan
from strata_coord.coordinator.super_chunks import even_super_chunks
from strata_coord.ipc.errors import RequestError

if TYPE_CHECKING:
    from strata_coord.ipc.messages import UploadPolicy

__all__ = ["STREAM_ALL_SHARE", "plan_prompt", "upload_policy"]

# From this share of expected distinct experts on, waiting for the router saves less than it costs: without
# the wait the next layer's uploads run during this layer's attention half.
STREAM_ALL_SHARE = 0.97
# Layer-major cuts that are predicted: the fewest, and up to this many more. The best number is near the ratio
# of compute to upload time.
_MORE_CUTS = 7


def upload_policy(launch: LaunchPlan, rows: int) -> UploadPolicy:
    """Return the policy for a super-chunk of rows, by the distinct experts that they are expected to hit."""
    if launch.upload != "auto":
        return launch.upload
    share = _distinct_share(launch, rows)
    return "stream-all" if share >= launch.stream_all_share else "routed-only"


def plan_prompt(launch: LaunchPlan, prompt_tokens: int, *, mode: ModeSetting = "auto") -> PromptPlan:
    """Return how a prompt is read.

    Args:
        launch: Sizes and costs.
        prompt_tokens: Length of the prompt.
        mode: "auto" takes the least predicted time; "layer-major" the largest super-chunk that fits;
            "chunk-major" super-chunks of one sub-chunk.

    Raises:
        RequestError: The prompt is empty or longer than the context.
    """
    if prompt_tokens < 1:
        message = f"the prompt has {prompt_tokens} tokens; at least 1 is needed"
        raise RequestError(message)
    if prompt_tokens > launch.context_tokens:
        message = (
            f"the prompt has {prompt_tokens} tokens, more than the context of {launch.context_tokens}; "
            "model.context_tokens is the setting"
        )
        raise RequestError(message)
    options = _options(launch, prompt_tokens)
    fastest = min(options, key=lambda option: option.predicted_ttft_s)  # the first of equals
    chosen = _chosen(options, fastest, mode)
    rows = min(chosen.super_chunks)
    return PromptPlan(
        prompt_tokens=prompt_tokens,
        mode=chosen.mode,
        slot_rows=_slot_rows(launch, chosen),
        super_chunk_tokens=chosen.super_chunk_tokens,
        super_chunks=chosen.super_chunks,
        sub_chunk_tokens=launch.sub_chunk_tokens,
        hand_off_slots=launch.hand_off_slots,
        boundaries=launch.boundaries,
        upload=upload_policy(launch, rows),
        reason=_reason(launch, options, chosen, fastest, mode),
        predicted_ttft_s=chosen.predicted_ttft_s,
        predicted_expert_bytes=_expert_bytes(launch, chosen),
        candidates=tuple(_candidate(option, chosen, mode) for option in options),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Option:
    mode: PrefillMode
    super_chunk_tokens: int
    super_chunks: tuple[int, ...]
    sub_chunk_tokens: int
    predicted_ttft_s: float = 0.0


def _options(launch: LaunchPlan, prompt_tokens: int) -> list[_Option]:
    """The cuts worth predicting, fewest super-chunks first, each cut once."""
    sub = launch.sub_chunk_tokens
    fewest = even_super_chunks(prompt_tokens, max_tokens=launch.super_chunk_tokens)
    cuts = {fewest: max(fewest)}
    for extra in range(1, _MORE_CUTS + 1):
        most = -(-prompt_tokens // (len(fewest) + extra))
        cap = max(sub, -(-most // sub) * sub)
        if cap < launch.super_chunk_tokens:
            cut = even_super_chunks(prompt_tokens, max_tokens=cap)
            cuts.setdefault(cut, max(cut))
    smallest = even_super_chunks(prompt_tokens, max_tokens=sub)
    cuts[smallest] = sub if len(smallest) > 1 else max(smallest)
    options = [
        _Option(
            mode=_mode(launch, tokens, cut),
            super_chunk_tokens=tokens,
            super_chunks=cut,
            sub_chunk_tokens=sub,
        )
        for cut, tokens in sorted(cuts.items(), key=lambda item: len(item[0]))
    ]
    return [replace(option, predicted_ttft_s=_predict(launch, option)) for option in options]


def _mode(launch: LaunchPlan, tokens: int, cut: tuple[int, ...]) -> PrefillMode:
    return "chunk-major" if len(cut) > 1 and tokens <= launch.sub_chunk_tokens else "layer-major"


def _chosen(options: list[_Option], fastest: _Option, mode: ModeSetting) -> _Option:
    if mode == "layer-major":
        return options[0]
    if mode == "chunk-major":
        return options[-1]
    return fastest


def _predict(launch: LaunchPlan, option: _Option) -> float:
    """Return the predicted time to the first token."""
    num_chunks = len(option.super_chunks)
    starts = [sum(option.super_chunks[:n]) for n in range(num_chunks)]
    times = []
    for stage in launch.stages:
        times.append(
            [
                stage_time(
                    stage.costs,
                    rows=rows,
                    first_position=start,
                    sub_chunk_tokens=option.sub_chunk_tokens,
                    streamed_share=_streamed_share(launch, rows),
                    touched_share=_distinct_share(launch, rows),
                    with_head=n == num_chunks - 1,
                ).total_s
                for n, (rows, start) in enumerate(zip(option.super_chunks, starts, strict=True))
            ]
        )
    slowest = min(stage.costs.hand_off_bytes_per_s for stage in launch.stages[:-1] or launch.stages)
    hand_offs = [rows * launch.row_bytes / slowest for rows in option.super_chunks]
    slots_each = -(-max(option.super_chunks) // _slot_rows(launch, option))
    ring = launch.hand_off_slots // slots_each
    return makespan_s(times, hand_offs, ring_super_chunks=ring)


def _distinct_share(launch: LaunchPlan, rows: int) -> float:
    return expected_distinct_share(
        rows, num_experts=launch.num_experts, experts_per_token=launch.experts_per_token
    )


def _streamed_share(launch: LaunchPlan, rows: int) -> float:
    return 1.0 if upload_policy(launch, rows) == "stream-all" else _distinct_share(launch, rows)


def _expert_bytes(launch: LaunchPlan, option: _Option) -> int:
    """Return the expert bytes that the cut is expected to upload: exact where all are streamed."""
    streamed = sum(stage.streamed_bytes for stage in launch.stages)
    policy = upload_policy(launch, min(option.super_chunks))
    if policy == "stream-all":
        return streamed * len(option.super_chunks)
    return int(sum(streamed * _distinct_share(launch, rows) for rows in option.super_chunks))


def _slot_rows(launch: LaunchPlan, option: _Option) -> int:
    sub = launch.sub_chunk_tokens
    return min(launch.slot_rows, -(-option.super_chunk_tokens // sub) * sub)


def _count(super_chunks: tuple[int, ...]) -> str:
    return f"{len(super_chunks)} super-chunk" + ("s" if len(super_chunks) > 1 else "")


def _reason(
    launch: LaunchPlan, options: list[_Option], chosen: _Option, fastest: _Option, mode: ModeSetting
) -> str:
    what = f"{chosen.mode}, {_count(chosen.super_chunks)} of up to {max(chosen.super_chunks)} rows"
    if len(options) == 1:
        why = (
            "the prompt fits in one"
            if len(chosen.super_chunks) == 1
            else "the plan has room for no more than one"
        )
        return f"{what}: the only cut, since {why} sub-chunk of {launch.sub_chunk_tokens} rows"
    if mode != "auto":
        lost = chosen.predicted_ttft_s - fastest.predicted_ttft_s
        if lost <= 0:
            return f"{what}: forced by --mode {mode}, which is also predicted to be fastest"
        return (
            f"{what}: forced by --mode {mode}; {fastest.mode} with {_count(fastest.super_chunks)} "
            f"is predicted to be {lost:.3f} s faster ({fastest.predicted_ttft_s:.3f} s)"
        )
    others = [option for option in options if option is not chosen]
    second = min(others, key=lambda option: option.predicted_ttft_s)
    return (
        f"{what}: predicted {chosen.predicted_ttft_s:.3f} s; next best is {second.mode} with "
        f"{_count(second.super_chunks)}, {second.predicted_ttft_s:.3f} s"
    )


def _candidate(option: _Option, chosen: _Option, mode: ModeSetting) -> Candidate:
    declined = None
    if option is not chosen:
        slower = option.predicted_ttft_s - chosen.predicted_ttft_s
        if mode != "auto":
            declined = f"--mode {mode} was given"
        else:
            declined = f"predicted {slower:.3f} s slower" if slower > 0 else "as fast, with more super-chunks"
    return Candidate(
        mode=option.mode,
        super_chunk_tokens=option.super_chunk_tokens,
        sub_chunk_tokens=option.sub_chunk_tokens,
        num_super_chunks=len(option.super_chunks),
        predicted_ttft_s=option.predicted_ttft_s,
        declined=declined,
    )
