import os
from collections.abc import Iterator

import pytest
from planning_fakes import fake_config, fake_model, fake_rig

from strata_coord.coordinator.assignments import stage_assignment
from strata_coord.coordinator.planner import plan_launch
from strata_coord.coordinator.shared_memory import StageMemory, TokenTable
from strata_coord.ipc.assignment import StageAssignment
from strata_coord.ipc.bootstrap import BOOTSTRAP, BOOTSTRAP_DESCRIPTORS, Bootstrap
from strata_coord.ipc.codec import decode_record
from strata_coord.ipc.errors import InvariantError
from strata_coord.ipc.host_memory import descriptor_pair, map_memfd, recv_descriptors


@pytest.fixture
def table() -> Iterator[TokenTable]:
    made = TokenTable(max_sequences=3, context_tokens=8)
    yield made
    made.close()


def words(table: TokenTable) -> list[list[int]]:
    with memoryview(os.pread(table.fd, 3 * 8 * 4, 0)).cast("i") as view:
        flat = view.tolist()
    return [flat[start : start + 8] for start in range(0, 24, 8)]


def test_ids_go_into_their_seats_row(table: TokenTable) -> None:
    table.write(1, 0, [5, 6, 7])
    table.write(1, 3, [8])
    table.write(2, 7, [9])
    assert words(table) == [[0] * 8, [5, 6, 7, 8, 0, 0, 0, 0], [0] * 7 + [9]]


@pytest.mark.parametrize(
    ("seat", "position", "count"), [(3, 0, 1), (-1, 0, 1), (0, 0, 9), (0, 7, 2), (2, 8, 1)]
)
def test_what_does_not_fit_the_row_is_refused_whole(
    table: TokenTable, seat: int, position: int, count: int
) -> None:
    with pytest.raises(InvariantError, match=f"seat {seat} of 3: {count} ids at position {position}"):
        table.write(seat, position, [1] * count)
    assert words(table) == [[0] * 8] * 3


@pytest.fixture
def assignment() -> StageAssignment:
    model = fake_model()
    return stage_assignment(plan_launch(model, fake_rig(), fake_config()), 1, model)


def test_a_worker_gets_everything_in_one_packet(assignment: StageAssignment, table: TokenTable) -> None:
    before = len(os.listdir("/proc/self/fd"))
    memory = StageMemory(assignment, arena_bytes=4096)
    ours, theirs = descriptor_pair()
    bootstrap = memory.bootstrap(
        launch="a" * 32,
        secret=b"s" * 32,
        run_directory="/run/x",
        stage=1,
        incarnation=1,
        numa_node=-1,
        wants_self_binding=False,
    )
    memory.send(ours, bootstrap, table)
    label, fds = recv_descriptors(theirs)
    named = dict(zip(BOOTSTRAP_DESCRIPTORS, fds, strict=True))
    assert label == BOOTSTRAP
    sizes = {name: os.fstat(fd).st_size for name, fd in named.items()}
    assert decode_record(Bootstrap, os.pread(named["record"], sizes["record"], 0)) == bootstrap
    assert decode_record(StageAssignment, os.pread(named["setup"], bootstrap.setup_bytes, 0)) == assignment
    assert sizes["arena"] == bootstrap.arena_bytes == 4096
    assert sizes["tokens"] == 3 * 8 * 4
    assert sizes["routing"] == bootstrap.routing_words * 4
    num_experts = assignment.geometry.experts.num_experts
    assert bootstrap.routing_words == (assignment.last_layer - assignment.first_layer) * num_experts

    # What the worker counts, the coordinator reads.
    shared = map_memfd(named["routing"], sizes["routing"], writable=True)
    with memoryview(shared) as raw, raw.cast("I") as cells:
        cells[num_experts + 2] = 2**32 - 1
    shared.close()
    counts = memory.routing_counts()
    assert counts[1][2] == 2**32 - 1
    assert sum(map(sum, counts)) == 2**32 - 1
    assert memory.status.snapshot() is None  # no worker has opened it

    for fd in fds:
        os.close(fd)
    ours.close()
    theirs.close()
    memory.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_no_arena_is_a_placeholder(assignment: StageAssignment) -> None:
    memory = StageMemory(assignment, arena_bytes=0)
    bootstrap = memory.bootstrap(
        launch="a",
        secret=b"",
        run_directory="",
        stage=0,
        incarnation=1,
        numa_node=2,
        wants_self_binding=True,
    )
    assert bootstrap.arena_bytes == 0
    assert bootstrap.wants_self_binding
    memory.close()


def test_memory_that_cannot_be_had_leaves_no_descriptor(
    assignment: StageAssignment, monkeypatch: pytest.MonkeyPatch
) -> None:
    from strata_coord.coordinator import shared_memory

    real = shared_memory.create_memfd

    def fail(name: str, num_bytes: int, *, numa_node: int = -1) -> int:
        if "arena" in name:
            raise MemoryError
        return real(name, num_bytes, numa_node=numa_node)

    monkeypatch.setattr(shared_memory, "create_memfd", fail)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(MemoryError):
        StageMemory(assignment, arena_bytes=1)
    assert len(os.listdir("/proc/self/fd")) == before
