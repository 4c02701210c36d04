"""ZeroMQ sockets of one host: the coordinator's control socket, its client in a worker, the neighbour link.

A message travels as [header, body], see signing.py and codec.py. What is not authentic is counted and
dropped. What is authentic but malformed, out of order, or not for this receiver ends the link as a
ProtocolError. Sending never blocks: a queue without room is an outcome, not a wait.

A socket belongs to the thread that made it. There is one context per process.

Heartbeats are off. A unix socket ends with its process, and a worker that hangs is found by its status page;
a heartbeat could only cut the link of a worker that is stopped or starved for two seconds, and lose the
messages that were under way.
"""

import contextlib
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import zmq

from strata_coord.ipc import codec
from strata_coord.ipc.endpoints import socket_path
from strata_coord.ipc.errors import InvariantError, ProtocolError
from strata_coord.ipc.messages import BetweenNeighbours, Direction, Message, ToCoordinator, ToStage
from strata_coord.ipc.signing import HEADER_BYTES, Signer, Verifier

SendOutcome = Literal["sent", "full", "unreachable"]

MAX_FRAME_BYTES = 65_536
CONTROL_QUEUE = 1024  # messages per direction and worker; far above what the scheduler keeps in flight
CONTROL_LINGER_MS = 500  # a last StageFailed or Shutdown still leaves
_MAX_FRAMES = 4
_MAX_BATCH = 256  # messages per recv_all, so that a talkative peer cannot hold the loop

_TO_COORDINATOR = typing.get_args(ToCoordinator)
_TO_STAGE = typing.get_args(ToStage)
_BETWEEN_NEIGHBOURS = typing.get_args(BetweenNeighbours)


def open_socket(kind: int, *, queue: int, linger_ms: int = 0) -> "zmq.Socket[bytes]":
    """Return a socket with every option that this program relies on. All sockets are made here."""
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    for option, value in socket_options(kind, queue=queue, linger_ms=linger_ms).items():
        socket.setsockopt(option, value)
    return socket


def socket_options(kind: int, *, queue: int, linger_ms: int) -> dict[zmq.SocketOption, int]:
    """Return the options of a socket; a test reads them back."""
    options = {
        zmq.SocketOption.LINGER: linger_ms,
        zmq.SocketOption.SNDHWM: queue,
        zmq.SocketOption.RCVHWM: queue,
        zmq.SocketOption.MAXMSGSIZE: MAX_FRAME_BYTES,
        zmq.SocketOption.IMMEDIATE: 1,  # no queueing for a peer that is not connected
        zmq.SocketOption.HANDSHAKE_IVL: 2000,
        zmq.SocketOption.HEARTBEAT_IVL: 0,
        zmq.SocketOption.BACKLOG: 16,
        zmq.SocketOption.RECONNECT_IVL: 20,
    }
    if kind == zmq.ROUTER:
        # Write-only options: an unknown or full peer is an error, and a second peer of one name is refused.
        options[zmq.SocketOption.ROUTER_MANDATORY] = 1
        options[zmq.SocketOption.ROUTER_HANDOVER] = 0
    return options


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerFault:
    """What the control server reports in place of a message that ends a worker's channel."""

    stage: int
    incarnation: int
    error: ProtocolError


@dataclass(slots=True, kw_only=True)
class _Peer:
    stage: int
    incarnation: int
    signer: Signer
    verifier: Verifier
    broken: bool = False


class _Link:
    """What the three kinds of socket share."""

    def __init__(self, socket: "zmq.Socket[bytes]") -> None:
        self.socket = socket
        self.num_dropped = 0  # frames that were not authentic, or not for a known peer

    def close(self) -> None:
        """Close the socket; the address is free afterwards."""
        self.socket.close()

    def _send_frames(self, frames: list[bytes]) -> SendOutcome:
        try:
            self.socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            return "full"
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return "unreachable"
        return "sent"

    def _recv_frames(self) -> list[bytes] | None:
        """Return the frames of one message; too many of them come back as an empty list. None: no message."""
        try:
            frames = [self.socket.recv(zmq.NOBLOCK)]
        except zmq.Again:
            return None
        num_frames = 1
        while self.socket.getsockopt(zmq.RCVMORE):
            frame = self.socket.recv(zmq.NOBLOCK)
            num_frames += 1
            if num_frames <= _MAX_FRAMES:
                frames.append(frame)
        return frames if num_frames <= _MAX_FRAMES else []


class ControlServer(_Link):
    """The coordinator's end: one ROUTER for all workers, each with its own signed channel."""

    def __init__(self, endpoint: str, *, secret: bytes, launch: str) -> None:
        super().__init__(open_socket(zmq.ROUTER, queue=CONTROL_QUEUE, linger_ms=CONTROL_LINGER_MS))
        self._secret, self._launch = secret, launch
        self._peers: dict[bytes, _Peer] = {}
        self._path = socket_path(endpoint)
        _bind(self.socket, endpoint)
        self._inode = self._path.stat().st_ino

    def expect(self, stage: int, incarnation: int) -> None:
        """Accept messages of this incarnation from here on; call it before its process starts."""
        identity = _identity(stage, incarnation)
        signer, verifier = _control_channel(self._secret, self._launch, stage, incarnation, is_server=True)
        self._peers[identity] = _Peer(stage=stage, incarnation=incarnation, signer=signer, verifier=verifier)

    def forget(self, stage: int, incarnation: int) -> None:
        """Drop whatever this incarnation still sends; call it when its process is reaped."""
        self._peers.pop(_identity(stage, incarnation), None)

    def send(self, stage: int, incarnation: int, message: ToStage) -> SendOutcome:
        """Send to a worker. "unreachable" until it has connected, and after it is gone.

        Raises:
            ProtocolError: the message does not fit its schema.
            InvariantError: the worker is not expected.
        """
        identity = _identity(stage, incarnation)
        peer = self._peers.get(identity)
        if peer is None:
            error = f"message for stage {stage}, incarnation {incarnation}, which is not expected"
            raise InvariantError(error)
        body = codec.encode_message(message)
        outcome = self._send_frames([identity, peer.signer.header(body), body])
        if outcome == "sent":
            peer.signer.sent()
        return outcome

    def recv_all(self) -> list[ToCoordinator | PeerFault]:
        """Return the messages that are here, in order per worker. A worker's fault is its last entry."""
        received: list[ToCoordinator | PeerFault] = []
        for _ in range(_MAX_BATCH):
            frames = self._recv_frames()
            if frames is None:
                break
            peer = self._peers.get(frames[0]) if len(frames) == 3 else None
            if peer is None or peer.broken:
                self.num_dropped += 1
                continue
            try:
                message = _open_message(frames[1:], peer.verifier, _TO_COORDINATOR)
                if message is None:
                    self.num_dropped += 1
                    continue
                received.append(_checked_origin(typing.cast("ToCoordinator", message), peer))
            except ProtocolError as error:
                peer.broken = True
                received.append(PeerFault(stage=peer.stage, incarnation=peer.incarnation, error=error))
        return received

    def is_own_path(self) -> bool:
        """Return whether the socket's path is still ours: another bind takes a path away in silence."""
        try:
            return self._path.stat().st_ino == self._inode
        except OSError:
            return False


class ControlClient(_Link):
    """A worker's end of its control channel."""

    def __init__(self, endpoint: str, *, secret: bytes, launch: str, stage: int, incarnation: int) -> None:
        super().__init__(open_socket(zmq.DEALER, queue=CONTROL_QUEUE, linger_ms=CONTROL_LINGER_MS))
        self._signer, self._verifier = _control_channel(secret, launch, stage, incarnation, is_server=False)
        self.socket.setsockopt(zmq.IDENTITY, _identity(stage, incarnation))
        self.socket.connect(endpoint)

    def wait_connected(self, timeout_s: float) -> bool:
        """Wait until messages can be sent; False when timeout_s passed. Needed before the first message."""
        return bool(self.socket.poll(round(timeout_s * 1000), zmq.POLLOUT))

    def send(self, message: ToCoordinator) -> SendOutcome:
        """Send to the coordinator; "full" also while there is no connection.

        Raises:
            ProtocolError: the message does not fit its schema.
        """
        return _send_signed(self._send_frames, self._signer, message)

    def recv_all(self) -> list[ToStage]:
        """Return the messages that are here, in order.

        Raises:
            ProtocolError: the coordinator broke the protocol; the channel is over.
        """
        received: list[ToStage] = []
        for _ in range(_MAX_BATCH):
            frames = self._recv_frames()
            if frames is None:
                break
            message = _open_message(frames, self._verifier, _TO_STAGE)
            if message is None:
                self.num_dropped += 1
            else:
                received.append(typing.cast("ToStage", message))
        return received


class NeighbourLink(_Link):
    """One end of one generation of a link. The receiver of rows binds and sends grants; the sender connects.

    A new generation gets a new object and a new address; the old one is closed.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        secret: bytes,
        launch: str,
        link: int,
        generation: int,
        direction: Direction,
        num_slots: int,
    ) -> None:
        # Each slot has at most one message under way in each direction; the rest is slack for stale ones.
        super().__init__(open_socket(zmq.PAIR, queue=4 * num_slots + 16))
        channel = {"secret": secret, "launch": launch, "link": f"link-{link}", "generation": generation}
        receives = direction == "in"
        self._signer = Signer(**channel, direction="up" if receives else "down")  # type: ignore[arg-type]
        self._verifier = Verifier(**channel, direction="down" if receives else "up")  # type: ignore[arg-type]
        if receives:
            _bind(self.socket, endpoint)
        else:
            self.socket.connect(endpoint)

    def is_connected(self) -> bool:
        """Return whether messages can be sent. LinkReady waits for it; until then poll for POLLOUT too."""
        return bool(self.socket.poll(0, zmq.POLLOUT))

    def send(self, message: BetweenNeighbours) -> SendOutcome:
        """Send to the neighbour; "full" also when it is gone, which the coordinator answers with Relink.

        Raises:
            ProtocolError: the message does not fit its schema.
        """
        return _send_signed(self._send_frames, self._signer, message)

    def recv_all(self) -> list[BetweenNeighbours]:
        """Return the messages that are here, in order.

        Raises:
            ProtocolError: the neighbour broke the protocol, or messages were lost; the generation is over.
        """
        received: list[BetweenNeighbours] = []
        for _ in range(_MAX_BATCH):
            frames = self._recv_frames()
            if frames is None:
                break
            message = _open_message(frames, self._verifier, _BETWEEN_NEIGHBOURS)
            if message is None:
                self.num_dropped += 1
            else:
                received.append(typing.cast("BetweenNeighbours", message))
        return received


def _send_signed(
    send_frames: Callable[[list[bytes]], SendOutcome], signer: Signer, message: Message
) -> SendOutcome:
    body = codec.encode_message(message)
    outcome = send_frames([signer.header(body), body])
    if outcome == "sent":
        signer.sent()
    return outcome


def _open_message(frames: list[bytes], verifier: Verifier, allowed: tuple[type, ...]) -> Message | None:
    """Return an authentic message that this receiver may get, None for one that is not authentic."""
    if len(frames) != 2 or len(frames[0]) != HEADER_BYTES or not verifier.accepts(frames[0], frames[1]):
        return None
    message = codec.decode_message(frames[1])
    if not isinstance(message, allowed):
        error = f"{type(message).__name__} came over a link that does not carry it"
        raise ProtocolError(error)
    return message


def _checked_origin(message: ToCoordinator, peer: _Peer) -> ToCoordinator:
    if (message.stage, message.incarnation) != (peer.stage, peer.incarnation):
        error = (
            f"{type(message).__name__} of stage {message.stage}, incarnation {message.incarnation} came from "
            f"stage {peer.stage}, incarnation {peer.incarnation}"
        )
        raise ProtocolError(error)
    return message


def _bind(socket: "zmq.Socket[bytes]", endpoint: str) -> None:
    with contextlib.ExitStack() as on_error:
        on_error.callback(socket.close)
        if socket_path(endpoint).exists():
            # A second bind would succeed and take the first one's peers away.
            error = "a socket of this name is in use"
            raise InvariantError(error)
        socket.bind(endpoint)
        on_error.pop_all()


def _identity(stage: int, incarnation: int) -> bytes:
    return f"{stage}-{incarnation}".encode("ascii")


def _control_channel(
    secret: bytes, launch: str, stage: int, incarnation: int, *, is_server: bool
) -> tuple[Signer, Verifier]:
    out, back = ("to-stage", "to-coordinator") if is_server else ("to-coordinator", "to-stage")
    link = f"control-{stage}"
    return (
        Signer(secret, launch=launch, link=link, generation=incarnation, direction=out),
        Verifier(secret, launch=launch, link=link, generation=incarnation, direction=back),
    )
