"""The memory that the coordinator shares with its workers: token table, status pages, arenas, routing tables.

The coordinator creates all of it and keeps every descriptor, so that memory outlives the worker that filled
it and a restarted worker finds it again. Nothing here has a name in the file system.
"""

import os
import socket
from collections.abc import Sequence

from strata_coord.coordinator.request_meter import RoutingCounts
from strata_coord.ipc.assignment import StageAssignment
from strata_coord.ipc.bootstrap import BOOTSTRAP, Bootstrap
from strata_coord.ipc.codec import encode_record
from strata_coord.ipc.errors import InvariantError
from strata_coord.ipc.host_memory import create_memfd, map_memfd, send_descriptors
from strata_coord.ipc.status_page import StatusReader, status_page_bytes

TOKEN_BYTES = 4


class TokenTable:
    """The ids of every running sequence: int32 [max_sequences, context_tokens], a row per seat."""

    def __init__(self, *, max_sequences: int, context_tokens: int) -> None:
        num_bytes = max_sequences * context_tokens * TOKEN_BYTES
        self._context_tokens = context_tokens
        self._max_sequences = max_sequences
        self.fd = create_memfd("tokens", num_bytes)
        self._map = map_memfd(self.fd, num_bytes, writable=True)
        self._bytes = memoryview(self._map)
        self._words = self._bytes.cast("i")

    def write(self, seat: int, position: int, ids: Sequence[int]) -> None:
        """Write ids from position on.

        Raises:
            InvariantError: they do not fit the seat's row.
        """
        if not 0 <= seat < self._max_sequences or position + len(ids) > self._context_tokens:
            message = (
                f"seat {seat} of {self._max_sequences}: {len(ids)} ids at position {position}, "
                f"the row holds {self._context_tokens}"
            )
            raise InvariantError(message)
        start = seat * self._context_tokens + position
        for place, token in enumerate(ids, start):
            self._words[place] = token

    def close(self) -> None:
        """Unmap and close."""
        self._words.release()
        self._bytes.release()
        self._map.close()
        os.close(self.fd)


class StageMemory:
    """One stage's status page, setup, arena and routing table."""

    def __init__(self, assignment: StageAssignment, *, arena_bytes: int) -> None:
        """Take the memory and write the assignment into the setup memfd."""
        geometry = assignment.geometry
        self._fds: dict[str, int] = {}
        self._num_experts = geometry.experts.num_experts
        self._num_layers = assignment.last_layer - assignment.first_layer
        self.setup = encode_record(assignment)
        self._arena_bytes = arena_bytes
        self._max_sequences = assignment.max_sequences
        self._context_tokens = assignment.context_tokens
        label = f"stage-{assignment.stage}"
        try:
            page_bytes = status_page_bytes(assignment.max_sequences)
            self._fds["status"] = create_memfd(f"{label}-status", page_bytes)
            self._fds["setup"] = create_memfd(f"{label}-setup", len(self.setup))
            self._fds["arena"] = create_memfd(
                f"{label}-arena", max(arena_bytes, 1), numa_node=assignment.numa_node
            )
            self.routing_words = self._num_layers * self._num_experts
            self._fds["routing"] = create_memfd(f"{label}-routing", self.routing_words * 4)
            os.pwrite(self._fds["setup"], self.setup, 0)
            self.status = StatusReader(
                map_memfd(self._fds["status"], page_bytes, writable=True), assignment.max_sequences
            )
            self._routing_map = map_memfd(self._fds["routing"], self.routing_words * 4, writable=False)
        except BaseException:
            self._close_fds()
            raise
        self._routing = memoryview(self._routing_map).cast("I")

    def routing_counts(self) -> RoutingCounts:
        """Rows of each expert of each own layer since the stage was ready, modulo 2**32."""
        words = self._routing.tolist()
        return tuple(
            tuple(words[number * self._num_experts : (number + 1) * self._num_experts])
            for number in range(self._num_layers)
        )

    def bootstrap(
        self,
        *,
        launch: str,
        secret: bytes,
        run_directory: str,
        stage: int,
        incarnation: int,
        numa_node: int,
        wants_self_binding: bool,
    ) -> Bootstrap:
        """The record that goes with the descriptors."""
        return Bootstrap(
            launch=launch,
            secret=secret,
            run_directory=run_directory,
            stage=stage,
            incarnation=incarnation,
            numa_node=numa_node,
            wants_self_binding=wants_self_binding,
            max_sequences=self._max_sequences,
            context_tokens=self._context_tokens,
            setup_bytes=len(self.setup),
            arena_bytes=self._arena_bytes,
            routing_words=self.routing_words,
        )

    def send(self, channel: socket.socket, bootstrap: Bootstrap, tokens: TokenTable) -> None:
        """Send the bootstrap packet down a worker's channel."""
        record = encode_record(bootstrap)
        record_fd = create_memfd("bootstrap", len(record))
        try:
            os.pwrite(record_fd, record, 0)
            order = (record_fd, self._fds["status"], tokens.fd, self._fds["setup"])
            send_descriptors(channel, BOOTSTRAP, [*order, self._fds["arena"], self._fds["routing"]])
        finally:
            os.close(record_fd)

    def close(self) -> None:
        """Unmap and close all."""
        self.status.close()
        self._routing.release()
        self._routing_map.close()
        self._close_fds()

    def _close_fds(self) -> None:
        while self._fds:
            os.close(self._fds.popitem()[1])
