"""The window's ring. The streams of ManualBackend run as a test steps them, so hazards are found, not met."""

import contextlib
import threading
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from manual_backend import ManualBackend, ManualStream
from stage_files import ExpertFile

from strata_coord.ipc.errors import InvariantError, ModelError
from strata_coord.stage_worker.backend import Backend, CpuBackend
from strata_coord.stage_worker.byte_reader import ByteReader
from strata_coord.stage_worker.counters import TransferCounters
from strata_coord.stage_worker.expert_tiers import ExpertTiers
from strata_coord.stage_worker.residency import place_experts
from strata_coord.stage_worker.stager import STAGING_SLOTS, Stager, Upload


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> ExpertFile:
    return ExpertFile(tmp_path_factory.mktemp("experts") / "experts.bin")


class Setup:
    """A stager over the experts of a file."""

    def __init__(
        self,
        experts: ExpertFile,
        backend: Backend | ManualBackend,
        *,
        window_slots: int,
        arena: Sequence[int],
    ) -> None:
        layouts = experts.layouts()
        self.experts, self.counters = experts, TransferCounters()
        self.reader = experts.reader(self.counters)
        self.tiers = ExpertTiers(
            layouts=layouts,
            residency=place_experts(
                layouts, resident=[()] * len(layouts), in_arena=[tuple(arena)] * len(layouts)
            ),
            backend=backend,  # type: ignore[arg-type]
            reader=self.reader,
        )
        self.tiers.load(progress=lambda _done, _total: None)
        self.loaded = self.counters.snapshot().file_read
        self.stager = Stager(
            tiers=self.tiers,
            backend=backend,  # type: ignore[arg-type]
            window_slots=window_slots,
            counters=self.counters,
        )
        self.seen: list[tuple[int, int, bytes]] = []

    def use(self, upload: Upload, compute: ManualStream) -> None:
        """Queue a kernel that reads the blob, then give the slot back."""
        compute.wait(upload.ready)  # type: ignore[arg-type]
        compute.run(lambda: self.seen.append((upload.layer, upload.expert, upload.blob.numpy().tobytes())))
        self.stager.release(upload, compute)  # type: ignore[arg-type]

    def assert_all_seen(self, order: Sequence[tuple[int, int]]) -> None:
        assert [(layer, expert) for layer, expert, _ in self.seen] == list(order)
        for layer, expert, content in self.seen:
            assert content == self.experts.blob(layer, expert), f"expert {expert} of layer {layer}"

    def close(self) -> None:
        self.stager.close()
        self.reader.close()


@pytest.fixture
def cpu(experts: ExpertFile) -> Iterator[Setup]:
    setup = Setup(experts, CpuBackend(), window_slots=2, arena=[0, 1, 2])
    yield setup
    setup.close()


def test_the_window_is_filled_ahead_and_no_further(experts: ExpertFile) -> None:
    backend = ManualBackend()
    compute = backend.side_stream("compute")
    setup = Setup(experts, backend, window_slots=3, arena=range(6))
    setup.stager.plan([(0, expert) for expert in range(6)])
    size = len(experts.blob(0, 0))
    assert setup.counters.snapshot().ram_to_device == 3 * size  # counted where it is issued
    uploads = [setup.stager.acquire(0, 0), setup.stager.acquire(0, 1)]
    assert [upload.slot for upload in uploads] == [0, 1]
    assert setup.counters.snapshot().ram_to_device == 3 * size
    for upload in uploads:
        setup.use(upload, compute)
    assert setup.counters.snapshot().ram_to_device == 5 * size
    assert setup.stager.acquire(0, 2).slot == 2
    assert setup.stager.acquire(0, 3).slot == 0
    setup.close()


@pytest.mark.parametrize("arena", [range(6), ()])
def test_a_slot_is_not_written_before_the_kernels_that_read_it_are_done(
    experts: ExpertFile, arena: Sequence[int]
) -> None:
    backend = ManualBackend()
    compute = backend.side_stream("compute")
    setup = Setup(experts, backend, window_slots=1, arena=arena)
    setup.stager.plan([(1, 4), (1, 5)])
    first = setup.stager.acquire(1, 4)
    setup.use(first, compute)  # queued, not run
    second = setup.stager.acquire(1, 5)
    assert first.slot == second.slot
    backend.run_all_but(compute)
    assert first.ready.is_done()
    assert not second.ready.is_done()
    assert second.blob.numpy().tobytes() == experts.blob(1, 4)  # the slot still holds the first
    backend.run_all_but()
    assert second.ready.is_done()
    assert second.blob.numpy().tobytes() == experts.blob(1, 5)
    setup.assert_all_seen([(1, 4)])
    setup.close()


def test_staging_is_not_read_into_before_it_was_copied(experts: ExpertFile) -> None:
    backend = ManualBackend()
    compute = backend.side_stream("compute")
    setup = Setup(experts, backend, window_slots=4, arena=())
    copy, _read = backend.streams[-2:]
    order = [(0, expert) for expert in range(4)]
    setup.stager.plan(order)
    backend.run_all_but(copy, compute)
    read_bytes = setup.counters.snapshot().file_read
    assert read_bytes == STAGING_SLOTS * len(experts.blob(0, 0))
    for layer, expert in order:
        setup.use(setup.stager.acquire(layer, expert), compute)
    backend.run_all_but()
    setup.assert_all_seen(order)
    setup.close()


def run_in_drawn_order(
    setup: Setup, order: Sequence[tuple[int, int]], compute: ManualStream, data: st.DataObject
) -> None:
    """Use the blobs of order; between two of them, step the streams as drawn; then run all that is left."""
    planned = 0
    for number, (layer, expert) in enumerate(order):
        if number == planned:  # a pass at a time, as the two policies plan
            planned = min(planned + data.draw(st.integers(1, 6)), len(order))
            setup.stager.plan(order[number:planned])
        for stream in data.draw(st.lists(st.sampled_from(compute.backend.streams), max_size=6)):
            stream.step()
        setup.use(setup.stager.acquire(layer, expert), compute)
    compute.backend.run_all_but()


@settings(deadline=None, derandomize=True, max_examples=60)
@given(data=st.data())
def test_no_interleaving_of_the_streams_mixes_blobs_up(experts: ExpertFile, data: st.DataObject) -> None:
    backend = ManualBackend()
    compute = backend.side_stream("compute")
    order = data.draw(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 5)), min_size=1, max_size=14))
    window_slots = data.draw(st.integers(1, 5))
    arena = data.draw(st.lists(st.integers(0, 5), unique=True))
    setup = Setup(experts, backend, window_slots=window_slots, arena=arena)
    with contextlib.closing(setup.reader):  # also when hypothesis ends the example early
        run_in_drawn_order(setup, order, compute, data)
    assert setup.stager.is_idle
    setup.assert_all_seen(order)
    assert setup.counters.snapshot().ram_to_device == sum(len(experts.blob(*place)) for place in order)


def test_another_blob_than_the_planned_one_is_a_bug(cpu: Setup) -> None:
    with pytest.raises(InvariantError, match="expert 3 of layer 0, but the planned upload is None"):
        cpu.stager.acquire(0, 3)
    cpu.stager.plan([(0, 1)])
    with pytest.raises(InvariantError, match=r"expert 2 of layer 0, but the planned upload is \(0, 1\)"):
        cpu.stager.acquire(0, 2)


def test_a_window_without_slots_is_refused(experts: ExpertFile) -> None:
    reader = experts.reader()
    layouts = experts.layouts()
    residency = place_experts(layouts, resident=[()] * 2, in_arena=[()] * 2)
    tiers = ExpertTiers(layouts=layouts, residency=residency, backend=CpuBackend(), reader=reader)
    with pytest.raises(InvariantError, match="the window has 0 slots, but needs at least 1"):
        Stager(tiers=tiers, backend=CpuBackend(), window_slots=0, counters=TransferCounters())
    reader.close()


@pytest.mark.parametrize("acquired", [0, 1, 5])
def test_after_an_abandoned_pass_the_next_one_finds_its_own_blobs(cpu: Setup, acquired: int) -> None:
    compute = CpuBackend().compute_stream()
    cpu.stager.plan([(0, expert) for expert in range(6)])
    for expert in range(acquired):
        cpu.stager.release(cpu.stager.acquire(0, expert), compute)
    assert not cpu.stager.is_idle
    moved = cpu.counters.snapshot().ram_to_device
    cpu.stager.abandon(compute)
    assert cpu.stager.is_idle
    assert cpu.counters.snapshot().ram_to_device == moved  # nothing more is uploaded for a lost cause
    cpu.stager.abandon(compute)
    order = [(1, expert) for expert in range(6)]
    cpu.stager.plan(order)
    for layer, expert in order:
        upload = cpu.stager.acquire(layer, expert)
        upload.ready.wait()
        assert upload.blob.numpy().tobytes() == cpu.experts.blob(layer, expert)
        cpu.stager.release(upload, compute)
    assert cpu.stager.is_idle


def test_a_failed_read_reaches_whoever_waits_for_the_blob(
    cpu: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()

    def broken(_reader: ByteReader, _target: memoryview, *, file: int, offset_bytes: int) -> None:
        gate.wait(10)
        message = f"file {file} ends before byte {offset_bytes}"
        raise ModelError(message)

    monkeypatch.setattr(ByteReader, "read_into", broken)
    cpu.stager.plan([(0, 0), (0, 3)])  # from the arena, from the file
    good, bad = cpu.stager.acquire(0, 0), cpu.stager.acquire(0, 3)
    good.ready.wait()
    gate.set()
    with pytest.raises(ModelError, match="ends before byte"):
        bad.ready.wait()
