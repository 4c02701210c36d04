"""A stage or a chain of them: sequences that share super-chunks, cancels, progress, broken files."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle.clear_ids import find_clear_ids
from oracle.fixtures import TinyCase
from oracle.reference import reference_logits
from oracle.vocabulary import tiny_vocabulary
from stage_chain import StageChain, Tiers, assignment, relative_error

from strata_coord.coordinator.model_index import load_model_index
from strata_coord.ipc.assignment import StageAssignment
from strata_coord.ipc.errors import InvariantError, ModelError, RequestError
from strata_coord.ipc.messages import NotFinite, SamplingSettings, Segment
from strata_coord.stage_worker.stage import Stage

NUM_EXPERTS = 16
ARCHITECTURES = ["tiny_qwen3moe_f32", "tiny_qwen4exp_f32"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stage")


def halves(case: TinyCase) -> tuple[int, ...]:
    return (2,) if "qwen3moe" in case.path.name else (3,)


# --- sequences that share super-chunks ----------------------------------------------------------------


def logits_of(path: Path, vocabulary: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.float32).view(-1, vocabulary)


def read_together(
    chain: StageChain, prompts: Sequence[Sequence[int]], turns: Sequence[Sequence[int]], folder: Path
) -> list[torch.Tensor]:
    """Logits of prompts read side by side; a turn gives the rows of each prompt in one super-chunk."""
    files = [folder / f"logits{number}.bin" for number in range(len(prompts))]
    operations = []
    for number, ids in enumerate(prompts):
        files[number].write_bytes(b"")
        operations.append(chain.open(number, ids))
    for turn in turns:
        segments = [(number, count) for number, count in enumerate(turn) if count]
        chain.run(segments, operations=operations, logits={number: files[number] for number, _ in segments})
        operations = []
    chain.run([], operations=[chain.drop(number) for number in range(len(prompts))])
    assert chain.is_at_rest
    return [logits_of(file, chain.index.geometry.vocabulary_size) for file in files]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_short_prompt_between_two_long_ones_equals_itself_alone(
    request: pytest.FixtureRequest, name: str, folder: Path
) -> None:
    case = request.getfixturevalue(name)
    prompts = [case.ids[start : start + count].tolist() for start, count in ((0, 96), (60, 5), (0, 81))]
    expected = [case.reference.logits[:96], None, case.reference.logits[:81]]
    with StageChain(case.path, boundaries=halves(case), sub_chunk_tokens=64) as chain:
        together = read_together(chain, prompts, [[96, 5, 81]], folder)
        in_turns = read_together(chain, prompts, [[32, 5, 0], [0, 0, 64], [64, 0, 17]], folder)
        alone = [chain.prompt_logits(ids, folder, [len(ids)]) for ids in prompts]
    for number, logits in enumerate(alone):
        for shared in (together[number], in_turns[number]):
            assert relative_error(shared, logits) <= 1e-5
            assert torch.equal(shared.argmax(-1), logits.argmax(-1))
        if expected[number] is not None:
            assert relative_error(logits, expected[number]) <= 1e-5


@settings(deadline=None, derandomize=True, max_examples=8)
@given(data=st.data())
def test_prompts_in_any_turns_equal_themselves_alone(
    tiny_qwen4exp_f32: TinyCase, folder: Path, data: st.DataObject
) -> None:
    case = tiny_qwen4exp_f32
    counts = data.draw(st.lists(st.integers(1, 70), min_size=2, max_size=4))
    left, turns = list(counts), []
    while any(left):
        turn = [data.draw(st.integers(0, remaining)) for remaining in left]
        if not any(turn):
            turn = left
        left = [have - take for have, take in zip(left, turn, strict=True)]
        turns.append(turn)
    with StageChain(
        case.path,
        boundaries=halves(case),
        sub_chunk_tokens=data.draw(st.sampled_from([8, 64])),
        max_rows=300,
        tiers=Tiers(resident=3, arena=6, window_slots=3),
    ) as chain:
        prompts = [
            case.ids[:count].tolist() for count in counts
        ]  # beginnings of one prompt: its logits are known
        for count, logits in zip(counts, read_together(chain, prompts, turns, folder), strict=True):
            assert relative_error(logits, case.reference.logits[:count]) <= 1e-5
            assert torch.equal(logits.argmax(-1), case.reference.logits[:count].argmax(-1))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_decoding_equals_reading_the_text_at_once(
    request: pytest.FixtureRequest, name: str, folder: Path
) -> None:
    case = request.getfixturevalue(name)
    prompt = case.ids[:30].tolist()
    with StageChain(case.path, boundaries=halves(case), sub_chunk_tokens=16) as chain:
        tokens = chain.greedy(1, prompt, 12, cuts=(16, 14), upload="routed-only")
        chain.run([], operations=[chain.drop(1)])
        logits = chain.prompt_logits(prompt + tokens, folder, [len(prompt) + len(tokens)])
    real = tiny_vocabulary().num_real
    assert tokens == logits[len(prompt) - 1 : -1, :real].argmax(-1).tolist()
    model_says = reference_logits(case.model, prompt + tokens)[len(prompt) - 1 : -1, :real]
    assert tokens == model_says.argmax(-1).tolist()


def test_sequences_decode_side_by_side_as_they_do_alone(tiny_qwen4exp_f32: TinyCase) -> None:
    prompts = {number: tiny_qwen4exp_f32.ids[:count].tolist() for number, count in ((1, 20), (2, 3), (3, 33))}
    with StageChain(tiny_qwen4exp_f32.path, boundaries=(4,)) as chain:
        alone = {}
        for number, ids in prompts.items():
            alone[number] = chain.greedy(number + 10, ids, 6)
            chain.run([], operations=[chain.drop(number + 10)])
        tokens = chain.run(
            [(number, len(ids)) for number, ids in prompts.items()],
            operations=[chain.open(number, ids) for number, ids in prompts.items()],
        )
        found: dict[int, list[int]] = {number: [] for number in prompts}
        for turn in range(6):
            for sampled in tokens:
                assert sampled.position == len(chain.token_ids[sampled.sequence])
                found[sampled.sequence].append(sampled.token)
                chain.token_ids[sampled.sequence].append(sampled.token)
            if turn < 5:  # in another order each time
                order = sorted(prompts, key=lambda number: (number + turn) % 3)
                tokens = chain.run([(number, 1) for number in order], upload="routed-only")
    assert found == alone


# --- cancels ------------------------------------------------------------------------------------------


def cancel_at(
    chain: StageChain, stage: int, layers_done: int, sequence: int
) -> Callable[[int, Segment], bool]:
    """Cancel sequence once stage has finished so many layers of the super-chunk, and at later stages."""
    start = len(chain.logs[stage].done)

    def cancel(asking: int, segment: Segment) -> bool:
        if segment.sequence != sequence:
            return False
        return asking > stage or (asking == stage and len(chain.logs[stage].done) - start >= layers_done)

    return cancel


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("upload", ["stream-all", "routed-only"])
def test_after_a_cancel_at_any_edge_a_prompt_equals_its_fresh_run(
    request: pytest.FixtureRequest, name: str, upload: str, folder: Path
) -> None:
    case = request.getfixturevalue(name)
    ids, other = case.ids[:48].tolist(), case.ids[100:124].tolist()
    streamed = Tiers(resident=2, arena=7, window_slots=3)
    with StageChain(case.path, boundaries=halves(case), sub_chunk_tokens=16, tiers=streamed) as chain:
        fresh = chain.prompt_logits(other, folder, [24], upload=upload)
        edges = [
            (super_chunk, stage, layers)
            for super_chunk in (0, 1, 2)
            for stage, part in enumerate(chain.stages)
            for layers in range(part.assignment.last_layer - part.assignment.first_layer)
            if super_chunk == 1 or layers == 0
        ]
        for sequence, (at, stage, layers) in enumerate(edges):
            operations = [chain.open(sequence, ids)]
            for number in range(3):
                cancelled = number >= at
                cancel = cancel_at(
                    chain, stage if number == at else 0, layers if number == at else 0, sequence
                )
                before = [len(log.done) for log in chain.logs]
                tokens = chain.run(
                    [(sequence, 16)],
                    operations=operations,
                    upload=upload,
                    **({"cancel": cancel} if cancelled else {}),
                )
                operations = []
                assert bool(tokens) != cancelled
                done = [len(log.done) - start for log, start in zip(chain.logs, before, strict=True)]
                if number == at:
                    assert [result.cancelled for result in chain.results] == [False] * stage + [True] * (
                        2 - stage
                    )
                    assert done[stage] == layers
                    assert not any(done[stage + 1 :])
                elif cancelled:
                    assert done == [0, 0]
            # What the cancelled walk left is dropped in the very super-chunk that begins the next prompt.
            drop = chain.drop(sequence)
            logits = folder / "next.bin"
            logits.write_bytes(b"")
            chain.run(
                [(500, 24)], operations=[drop, chain.open(500, other)], upload=upload, logits={500: logits}
            )
            chain.run([], operations=[chain.drop(500)])
            assert chain.is_at_rest
            assert torch.equal(logits_of(logits, fresh.shape[1]), fresh), (at, stage, layers)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_prompts_that_share_the_last_super_chunk_of_a_cancelled_one_go_on(
    tiny_qwen4exp_f32: TinyCase, folder: Path, stage: int
) -> None:
    """The shared super-chunk was issued before the cancel, and the walk before it was given up in a layer."""
    case = tiny_qwen4exp_f32
    guests = {2: case.ids[:7].tolist(), 3: case.ids[:40].tolist()}
    with StageChain(case.path, boundaries=(3, 6), sub_chunk_tokens=16) as chain:
        chain.run([(1, 16)], operations=[chain.open(1, case.ids[:30].tolist())])
        chain.run([(1, 8)], cancel=cancel_at(chain, stage, 1, sequence=1))
        assert [result.cancelled for result in chain.results] == [False] * stage + [True] * (3 - stage)
        files = {sequence: folder / f"guest{sequence}.bin" for sequence in guests}
        for file in files.values():
            file.write_bytes(b"")
        tokens = chain.run(
            [(2, 7), (1, 6), (3, 40)],
            operations=[chain.open(sequence, ids) for sequence, ids in guests.items()],
            cancel=lambda _stage, segment: segment.sequence == 1,
            logits=files,
        )
        assert not any(result.cancelled for result in chain.results)
        assert [token.sequence for token in tokens] == [2, 3]
        chain.run([], operations=[chain.drop(sequence) for sequence in (1, 2, 3)])
        assert chain.is_at_rest
        for sequence, ids in guests.items():
            logits = logits_of(files[sequence], 512)
            assert relative_error(logits, case.reference.logits[: len(ids)]) <= 1e-5
        # The number of a dropped sequence is as good as new.
        again = chain.greedy(1, case.ids[:30].tolist(), 1)
        assert again == [int(case.reference.logits[29, : tiny_vocabulary().num_real].argmax())]


def test_one_cancelled_segment_among_others_stops_nothing(tiny_qwen3moe_f32: TinyCase) -> None:
    ids = tiny_qwen3moe_f32.ids[:8].tolist()
    with StageChain(tiny_qwen3moe_f32.path) as chain:
        tokens = chain.run(
            [(1, 8), (2, 8)],
            operations=[chain.open(1, ids), chain.open(2, ids)],
            cancel=lambda _stage, segment: segment.sequence == 1,
        )
        assert [token.sequence for token in tokens] == [1, 2]
        assert tokens[0].token == tokens[1].token


# --- progress and counts -------------------------------------------------------------------------------


def test_progress_is_shown_inside_half_layers_and_the_head(tiny_qwen3moe_f32: TinyCase, folder: Path) -> None:
    """A half layer of a large super-chunk may take longer than a stage may be silent."""
    with StageChain(tiny_qwen3moe_f32.path, sub_chunk_tokens=64) as chain:
        chain.prompt_logits(tiny_qwen3moe_f32.ids[:130].tolist(), folder, [130])
        geometry, log = chain.index.geometry, chain.logs[0]
    sub_chunks = 3
    assert log.num_heads == 1
    assert (
        log.num_parts >= geometry.num_layers * (sub_chunks + geometry.experts.experts_per_token) + sub_chunks
    )


def test_routing_counts_are_rows_times_choices(tiny_qwen3moe_f32: TinyCase) -> None:
    with StageChain(tiny_qwen3moe_f32.path) as chain:
        chain.greedy(1, tiny_qwen3moe_f32.ids[:37].tolist(), 2)
        per_token = chain.index.geometry.experts.experts_per_token
        assert [(layer, sum(counts)) for layer, counts in chain.logs[0].done] == [
            *((layer, 37 * per_token) for layer in range(3)),
            *((layer, per_token) for layer in range(3)),
        ]


def test_progress_of_loading_ends_at_the_total(tiny_qwen3moe_q: TinyCase) -> None:
    stage = Stage(_assignment(tiny_qwen3moe_q.path), observer=_Silent())
    seen: dict[str, list[tuple[int, int]]] = {}
    stage.load(progress=lambda what, done, total: seen.setdefault(what, []).append((done, total)))
    stage.close()
    assert set(seen) == {"dense weights", "embedding", "experts"}
    for steps in seen.values():
        assert [done for done, _ in steps] == sorted({done for done, _ in steps})
        assert steps[-1][0] == steps[-1][1] > 0


# --- refusals and faults ------------------------------------------------------------------------------


class _Silent:
    def attention_half(self, layer: int) -> None: ...
    def expert_half(self, layer: int) -> None: ...
    def layer_done(self, layer: int, counts: Sequence[int]) -> None: ...
    def head(self) -> None: ...
    def advance(self) -> None: ...


def _assignment(path: Path, **changes: object) -> StageAssignment:
    index = load_model_index(path)
    values: dict = {
        "stage": 0,
        "edges": (0, index.geometry.num_layers),
        "tiers": Tiers(resident=3, arena=4),
        "sub_chunk_tokens": 16,
        "max_rows": 64,
        "group_rows": 8,
        "max_sequences": 2,
        "context_tokens": 128,
        "kv_dtype": "fp32",
        "kv_pool_tokens": 256,
        "max_snapshots": 0,
    }
    return assignment(index, **(values | changes))


def test_more_rows_than_planned_are_refused(tiny_qwen3moe_f32: TinyCase) -> None:
    with StageChain(tiny_qwen3moe_f32.path, max_rows=16) as chain:
        operation = chain.open(1, tiny_qwen3moe_f32.ids.tolist())
        with pytest.raises(InvariantError, match="super-chunk 0 has 17 rows, but the plan has 16"):
            chain.run([(1, 17)], operations=[operation])


def test_a_full_pool_is_refused_before_any_layer_has_run(tiny_qwen3moe_f32: TinyCase) -> None:
    ids = tiny_qwen3moe_f32.ids.tolist()
    with StageChain(tiny_qwen3moe_f32.path, max_sequences=2, context_tokens=64) as chain:
        operations = [chain.open(1, ids), chain.open(2, ids)]
        with pytest.raises(RequestError, match="KV pool is full"):
            chain.run([(1, 64), (2, 65)], operations=operations)
        assert not chain.logs[0].done


@pytest.mark.leaves("the streams of a stage that cannot be built: its process ends")
def test_a_tensor_of_a_wrong_shape_is_refused_with_both_shapes(tiny_qwen3moe_f32: TinyCase) -> None:
    good = _assignment(tiny_qwen3moe_f32.path)
    tensors = tuple(
        replace(extent, shape=(256, 8)) if extent.name == "blk.1.attn_q.weight" else extent
        for extent in good.tensors
    )
    with pytest.raises(
        ModelError, match=r"blk\.1\.attn_q\.weight has shape \[256, 8\], the architecture needs \["
    ):
        Stage(replace(good, tensors=tensors), observer=_Silent())


@pytest.mark.parametrize("upload", ["stream-all", "routed-only"])
def test_a_file_cut_short_during_a_run_names_itself(
    tiny_qwen3moe_f32: TinyCase, tmp_path: Path, upload: str
) -> None:
    path = tmp_path / "model.gguf"
    shutil.copy(tiny_qwen3moe_f32.path, path)
    ids = tiny_qwen3moe_f32.ids.tolist()
    with StageChain(path, tiers=Tiers(arena=0)) as chain:
        chain.greedy(1, ids[:8], 2, upload=upload)
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size // 2)
        operation = chain.open(2, ids)
        with pytest.raises(ModelError, match=r"model\.gguf: ends at byte \d+, but bytes up to \d+ belong to"):
            chain.run([(2, 128)], operations=[operation], upload=upload)


def test_a_file_cut_short_before_loading_names_itself(tiny_qwen3moe_f32: TinyCase, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    shutil.copy(tiny_qwen3moe_f32.path, path)
    stage = Stage(_assignment(path), observer=_Silent())
    with path.open("r+b") as file:
        file.truncate(100_000)
    with pytest.raises(ModelError, match="did the file change"):
        stage.load(progress=lambda _what, _done, _total: None)
    stage.close()


def test_a_row_that_is_not_finite_fails_its_own_request_only(tiny_qwen3moe_f32: TinyCase) -> None:
    ids = tiny_qwen3moe_f32.ids[:8].tolist()
    with StageChain(tiny_qwen3moe_f32.path, boundaries=(2,)) as chain:
        receive = chain.links[0].receive

        def spoilt(super_chunk: object, rows_SW: torch.Tensor) -> bool:
            arrived = receive(super_chunk, rows_SW)  # type: ignore[arg-type]
            rows_SW[7] = float("nan")
            return arrived

        chain.links[0].receive = spoilt  # type: ignore[method-assign]
        tokens = chain.run([(1, 8), (2, 8)], operations=[chain.open(1, ids), chain.open(2, ids)])
        assert chain.results[1].not_finite == (NotFinite(sequence=1, layer=-1),)
        assert [token.sequence for token in tokens] == [2]
        assert tokens[0].token >= 0


def test_a_stage_samples_only_where_it_is_asked(tiny_qwen3moe_f32: TinyCase) -> None:
    ids = tiny_qwen3moe_f32.ids[:8].tolist()
    with StageChain(tiny_qwen3moe_f32.path) as chain:
        assert chain.run([(1, 4)], operations=[chain.open(1, ids)], sample=None) == []
        hot = SamplingSettings(temperature=3.0, seed=1)
        drawn = chain.run([(1, 4)], sample=hot)
        assert len(drawn) == 1
        assert drawn[0].position == 8
        assert drawn[0].logprob < 0.0


def test_clock_of_a_stage_sums_to_the_wall(tiny_qwen3moe_f32: TinyCase) -> None:
    with StageChain(tiny_qwen3moe_f32.path, tiers=Tiers(arena=0)) as chain:
        before = chain.stages[0].clock.snapshot()
        chain.greedy(1, tiny_qwen3moe_f32.ids[:32].tolist(), 3)
        after = chain.stages[0].clock.snapshot()
    names = ("busy_ns", "wait_rows_ns", "wait_experts_ns", "wait_slot_ns", "hand_off_ns")
    spent = {name: getattr(after, name) - getattr(before, name) for name in names}
    assert sum(spent.values()) == after.now_ns - before.now_ns
    assert spent["busy_ns"] > 0
    assert spent["wait_experts_ns"] > 0


def test_a_clear_prompt_found_now_is_read_like_any_other(tiny_qwen3moe_q: TinyCase, folder: Path) -> None:
    """Another prompt than the stored one, so that nothing is tuned to it."""
    ids = find_clear_ids(tiny_qwen3moe_q.model, num_tokens=64, seed=11)
    with StageChain(tiny_qwen3moe_q.path, boundaries=(1, 2)) as chain:
        found = chain.prompt_logits(ids.tolist(), folder, [33, 31])
    expected = reference_logits(tiny_qwen3moe_q.model, ids)
    assert relative_error(found, expected) <= 5e-5
    assert torch.equal(found.argmax(-1), expected.argmax(-1))
