"""Entry of a stage worker: binding and Hello first, torch after.

Started by the coordinator with two inherited descriptors; a person has no use for it. Until Hello nothing
heavy is imported, so that the coordinator knows within a fraction of a second whether the process lives.
"""

import argparse
import faulthandler
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from strata_coord.ipc.bootstrap import BOOTSTRAP, BOOTSTRAP_DESCRIPTORS, Bootstrap
from strata_coord.ipc.codec import decode_record
from strata_coord.ipc.endpoints import control_endpoint
from strata_coord.ipc.errors import ProtocolError
from strata_coord.ipc.host_memory import map_memfd, recv_descriptors
from strata_coord.ipc.lifeline import die_with_parent, exit_when_closed
from strata_coord.ipc.links import ControlClient
from strata_coord.ipc.memory_policy import (
    MPOL_BIND,
    bind_cpus,
    memory_policy,
    node_cpus,
    set_memory_policy,
)
from strata_coord.ipc.messages import Hello
from strata_coord.ipc.status_page import StatusWriter, status_page_bytes

BOOTSTRAP_TIMEOUT_S = 30.0
CONNECT_TIMEOUT_S = 10.0


@dataclass(slots=True, kw_only=True)
class Inherited:
    """What came with the process and over its channel."""

    bootstrap: Bootstrap
    fds: Mapping[str, int]
    channel: socket.socket

    def receive(self) -> tuple[bytes, list[int]]:
        """The next packet of the channel; BlockingIOError if none is here."""
        return recv_descriptors(self.channel)


def main() -> int:
    """Run one worker; returns its exit code."""
    parser = argparse.ArgumentParser(prog="strata-coord stage worker", description=__doc__)
    parser.add_argument("--run-id", required=True)
    parser.add_argument("--stage", type=int, required=True)
    parser.add_argument("--parent-pid", type=int, required=True)
    parser.add_argument("--channel-fd", type=int, required=True)
    parser.add_argument("--lifeline-fd", type=int, required=True)
    arguments = parser.parse_args()
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the coordinator decides what Ctrl-C means
    die_with_parent(arguments.parent_pid)
    exit_when_closed(arguments.lifeline_fd)
    inherited = _receive_bootstrap(arguments.channel_fd)
    bootstrap = inherited.bootstrap
    binding = _bind(bootstrap)

    status = StatusWriter(
        map_memfd(inherited.fds["status"], status_page_bytes(bootstrap.max_sequences), writable=True),
        bootstrap.max_sequences,
        pid=os.getpid(),
        incarnation=bootstrap.incarnation,
        now_ns=time.monotonic_ns(),
    )
    control = ControlClient(
        control_endpoint(Path(bootstrap.run_directory)),
        secret=bootstrap.secret,
        launch=bootstrap.launch,
        stage=bootstrap.stage,
        incarnation=bootstrap.incarnation,
    )
    if not control.wait_connected(CONNECT_TIMEOUT_S):
        message = (
            f"stage {bootstrap.stage}: no connection to the coordinator within {CONNECT_TIMEOUT_S:.0f} s"
        )
        raise ProtocolError(message)
    control.send(
        Hello(
            stage=bootstrap.stage,
            incarnation=bootstrap.incarnation,
            pid=os.getpid(),
            binding=binding,
            numa_node=bootstrap.numa_node if binding != "none" else -1,
        )
    )
    from strata_coord.stage_worker.worker import Worker

    code = Worker(inherited, control, status).run()
    control.close()
    return code


def _receive_bootstrap(channel_fd: int) -> Inherited:
    channel = socket.socket(fileno=channel_fd)
    channel.settimeout(BOOTSTRAP_TIMEOUT_S)
    label, fds = recv_descriptors(channel)
    channel.settimeout(0.0)
    if label != BOOTSTRAP or len(fds) != len(BOOTSTRAP_DESCRIPTORS):
        message = f"the first packet has {len(fds)} descriptors, {len(BOOTSTRAP_DESCRIPTORS)} are needed"
        raise ProtocolError(message)
    named = dict(zip(BOOTSTRAP_DESCRIPTORS, fds, strict=True))
    size = os.fstat(named["record"]).st_size
    record = map_memfd(named["record"], size, writable=False)
    bootstrap = decode_record(Bootstrap, bytes(record))
    record.close()
    os.close(named.pop("record"))
    return Inherited(bootstrap=bootstrap, fds=named, channel=channel)


def _bind(bootstrap: Bootstrap) -> str:
    """Bring about what numactl could not; returns the rung that holds."""
    node = bootstrap.numa_node
    if node < 0:
        return "none"
    if not bootstrap.wants_self_binding:
        policy = memory_policy()
        return "numactl" if not isinstance(policy, str) and policy[0] == MPOL_BIND else "cpu-only"
    cpus_refused = bind_cpus(node_cpus(node))
    memory_refused = set_memory_policy(MPOL_BIND, frozenset({node}))
    for refused in (cpus_refused, memory_refused):
        if refused is not None:
            print(f"stage {bootstrap.stage}: node {node}: {refused}", file=sys.stderr)
    if cpus_refused is not None:
        return "none"
    return "self" if memory_refused is None else "cpu-only"


if __name__ == "__main__":
    sys.exit(main())
