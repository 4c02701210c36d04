import dataclasses
import tempfile
from pathlib import Path

import pytest
import zmq

from strata_coord.ipc import codec, links
from strata_coord.ipc.endpoints import control_endpoint, link_endpoint
from strata_coord.ipc.errors import InvariantError, ProtocolError
from strata_coord.ipc.links import ControlClient, ControlServer, NeighbourLink, PeerFault
from strata_coord.ipc.messages import Grant, Hello, LinkReady, Put, Return, Shutdown
from strata_coord.ipc.signing import Signer

SECRET = bytes(range(32))
LAUNCH = "0123456789abcdef"
WAIT_S = 10
HELLO = Hello(stage=0, incarnation=1, pid=1, binding="none", numa_node=-1)


@pytest.fixture
def folder():
    with tempfile.TemporaryDirectory(prefix="sc") as path:
        yield Path(path)


@pytest.fixture
def closing():
    """Closes at the end whatever a test opened."""
    opened: list = []

    def keep(link):
        opened.append(link)
        return link

    yield keep
    for link in opened:
        link.close()


@pytest.fixture
def server(folder, closing):
    return closing(ControlServer(control_endpoint(folder), secret=SECRET, launch=LAUNCH))


def client_of(folder, closing, *, stage=0, incarnation=1, secret=SECRET) -> ControlClient:
    client = ControlClient(
        control_endpoint(folder), secret=secret, launch=LAUNCH, stage=stage, incarnation=incarnation
    )
    assert closing(client).wait_connected(WAIT_S)
    return client


def receive(link, count=1):
    received: list = []
    while len(received) < count:
        assert link.socket.poll(WAIT_S * 1000), f"{len(received)} of {count} messages came"
        received += link.recv_all()
    return received


def neighbours(folder, closing, num_slots=2):
    ends = [
        closing(
            NeighbourLink(
                link_endpoint(folder, 0, 1),
                secret=SECRET,
                launch=LAUNCH,
                link=0,
                generation=1,
                direction=direction,
                num_slots=num_slots,
            )
        )
        for direction in ("in", "out")
    ]
    for end in ends:
        assert end.socket.poll(WAIT_S * 1000, zmq.POLLOUT)
        assert end.is_connected()
    return ends


def raw_peer(folder, closing, kind, endpoint, identity=None):
    """A socket of someone who is in the folder, and has no link class to keep to."""
    socket = closing(zmq.Context.instance().socket(kind))
    socket.linger = 0
    if identity is not None:
        socket.setsockopt(zmq.IDENTITY, identity)
    socket.connect(endpoint)
    assert socket.poll(WAIT_S * 1000, zmq.POLLOUT)
    return socket


def signer_of_stage(incarnation=1):
    return Signer(SECRET, launch=LAUNCH, link="control-0", generation=incarnation, direction="to-coordinator")


def test_control_messages_go_both_ways(folder, server, closing):
    server.expect(0, 1)
    client = client_of(folder, closing)
    assert client.send(HELLO) == "sent"
    assert receive(server) == [HELLO]
    assert server.send(0, 1, Shutdown(incarnation=1)) == "sent"
    assert receive(client) == [Shutdown(incarnation=1)]
    assert server.recv_all() == []


def test_workers_have_channels_of_their_own(folder, server, closing):
    for stage in range(2):
        server.expect(stage, 1)
    clients = [client_of(folder, closing, stage=stage) for stage in range(2)]
    for stage, client in enumerate(clients):
        for epoch in range(3):
            client.send(LinkReady(stage=stage, incarnation=1, link=epoch, generation=1, direction="in"))
    found = receive(server, 6)
    for stage in range(2):
        assert [message.link for message in found if message.stage == stage] == [0, 1, 2]


def test_a_worker_that_is_not_there_is_an_outcome_and_one_not_expected_a_bug(server):
    server.expect(0, 1)
    assert server.send(0, 1, Shutdown(incarnation=1)) == "unreachable"
    with pytest.raises(InvariantError, match="stage 1, incarnation 1"):
        server.send(1, 1, Shutdown(incarnation=1))


def test_a_worker_that_does_not_read_never_blocks_the_coordinator(folder, server, closing):
    server.expect(0, 1)
    client_of(folder, closing).send(HELLO)
    receive(server)
    outcomes = {server.send(0, 1, Shutdown(incarnation=1)) for _ in range(20_000)}
    assert outcomes == {"sent", "full"}


def test_an_old_incarnation_is_not_heard(folder, server, closing):
    server.expect(0, 1)
    old = client_of(folder, closing)
    server.forget(0, 1)
    server.expect(0, 2)
    new = client_of(folder, closing, incarnation=2)
    old.send(HELLO)
    new.send(dataclasses.replace(HELLO, incarnation=2))
    assert receive(server) == [dataclasses.replace(HELLO, incarnation=2)]
    while server.num_dropped == 0:
        assert server.socket.poll(WAIT_S * 1000)
        assert server.recv_all() == []


def test_another_secret_is_dropped_and_counted(folder, server, closing):
    server.expect(0, 1)
    client_of(folder, closing, secret=bytes(32)).send(HELLO)
    assert server.socket.poll(WAIT_S * 1000)
    assert server.recv_all() == []
    assert server.num_dropped == 1


def test_bytes_that_are_not_signed_are_dropped(folder, server, closing):
    server.expect(0, 1)
    stranger = raw_peer(folder, closing, zmq.DEALER, control_endpoint(folder), b"0-1")
    pickled = b"\x80\x04\x8c\x02os\x94\x8c\x06system\x94\x93\x94\x8c\x02id\x94\x85\x94R\x94."
    junk = [
        [b""],
        [pickled],
        [pickled, pickled],
        [b"x"] * 3,
        [b"x"] * 50,
        [bytes(40), codec.encode_message(HELLO)],
    ]
    for frames in junk:
        stranger.send_multipart(frames)
    while server.num_dropped < len(junk):
        assert server.socket.poll(WAIT_S * 1000)
        assert server.recv_all() == []
    signer = signer_of_stage()
    body = codec.encode_message(HELLO)
    stranger.send_multipart([signer.header(body), body])
    assert receive(server) == [HELLO]


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: [codec.encode_message(HELLO)] * 2, "message number 0 where 1 is due"),
        (lambda: [b"\xc0"], "does not open with a protocol version"),
        (lambda: [codec.encode_message(Shutdown(incarnation=1))], "does not carry it"),
        (
            lambda: [codec.encode_message(dataclasses.replace(HELLO, stage=5))],
            "stage 5, incarnation 1 came from",
        ),
        (
            lambda: [codec.encode_message(dataclasses.replace(HELLO, incarnation=9))],
            "incarnation 9 came from",
        ),
    ],
    ids=["replay", "malformed", "direction", "stage", "incarnation"],
)
def test_a_worker_that_breaks_the_protocol_is_a_fault_and_then_silent(
    folder, server, closing, make, complaint
):
    server.expect(0, 1)
    peer = raw_peer(folder, closing, zmq.DEALER, control_endpoint(folder), b"0-1")
    signer = signer_of_stage()
    bodies = make()
    for body in bodies:
        peer.send_multipart([signer.header(body), body])
    fault = receive(server, len(bodies))[-1]
    assert isinstance(fault, PeerFault)
    assert (fault.stage, fault.incarnation) == (0, 1)
    assert complaint in str(fault.error)
    body = codec.encode_message(HELLO)
    peer.send_multipart([signer.header(body), body])
    while server.num_dropped == 0:
        assert server.socket.poll(WAIT_S * 1000)
        assert server.recv_all() == []


def test_a_frame_above_the_limit_cuts_its_sender_only(folder, server, closing):
    server.expect(0, 1)
    server.expect(1, 1)
    good = client_of(folder, closing, stage=1)
    raw_peer(folder, closing, zmq.DEALER, control_endpoint(folder), b"0-1").send(
        bytes(links.MAX_FRAME_BYTES + 1)
    )
    message = dataclasses.replace(HELLO, stage=1)
    good.send(message)
    assert receive(server) == [message]


def test_the_largest_message_fits_a_frame(folder, server, closing):
    server.expect(0, 1)
    peer = raw_peer(folder, closing, zmq.DEALER, control_endpoint(folder), b"0-1")
    body = bytes(codec.MAX_MESSAGE_BYTES)
    peer.send_multipart([signer_of_stage().header(body), body])
    assert isinstance(receive(server)[0], PeerFault)


def test_a_client_refuses_what_a_stage_may_not_get(folder, closing):
    router = closing(links.open_socket(zmq.ROUTER, queue=16))
    router.bind(control_endpoint(folder))
    client = client_of(folder, closing)
    client.send(HELLO)
    router.recv_multipart()
    body = codec.encode_message(HELLO)
    signer = Signer(SECRET, launch=LAUNCH, link="control-0", generation=1, direction="to-stage")
    router.send_multipart([b"0-1", signer.header(body), body])
    assert client.socket.poll(WAIT_S * 1000)
    with pytest.raises(ProtocolError, match="does not carry it"):
        client.recv_all()


def test_neighbours_exchange_grants_and_puts(folder, closing):
    receiver, sender = neighbours(folder, closing)
    grants = [Grant(generation=1, epoch=1, slot=slot) for slot in range(2)]
    assert [receiver.send(grant) for grant in grants] == ["sent", "sent"]
    assert receive(sender, 2) == grants
    put = Put(generation=1, epoch=1, hand_off=0, slot=0, super_chunk=0, first_row=0, rows=1, last=True)
    answers = [put, Return(generation=1, epoch=1, slot=1)]
    for answer in answers:
        assert sender.send(answer) == "sent"
    assert receive(receiver, 2) == answers


def test_the_first_send_after_connecting_is_not_lost(folder, closing):
    ends = neighbours(folder, closing)
    for end in ends:
        assert end.send(Grant(generation=1, epoch=1, slot=0)) == "sent"
    for end in ends:
        assert len(receive(end)) == 1


def test_a_neighbour_that_is_gone_or_does_not_read_never_blocks(folder, closing):
    receiver, sender = neighbours(folder, closing)
    outcomes = [receiver.send(Grant(generation=1, epoch=1, slot=0)) for _ in range(5000)]
    assert set(outcomes) == {"sent", "full"}
    sender.close()
    while receiver.is_connected():
        receiver.recv_all()
    assert receiver.send(Grant(generation=1, epoch=1, slot=0)) == "full"


def test_a_second_bind_does_not_take_a_path_away(folder, server, closing):
    with pytest.raises(InvariantError, match="in use"):
        ControlServer(control_endpoint(folder), secret=SECRET, launch=LAUNCH)
    assert server.is_own_path()


def test_a_stolen_path_is_noticed(folder, server, closing):
    thief = closing(zmq.Context.instance().socket(zmq.ROUTER))
    thief.bind(control_endpoint(folder))
    assert not server.is_own_path()


@pytest.mark.parametrize("kind", [zmq.ROUTER, zmq.DEALER, zmq.PAIR])
def test_every_socket_has_the_options_that_the_protocol_relies_on(closing, kind):
    socket = closing(links.open_socket(kind, queue=24, linger_ms=7))
    write_only = {zmq.ROUTER_MANDATORY, zmq.ROUTER_HANDOVER}
    options = links.socket_options(kind, queue=24, linger_ms=7)
    found = {option: socket.getsockopt(option) for option in options if option not in write_only}
    assert found == {option: value for option, value in options.items() if option not in write_only}
    assert found[zmq.MAXMSGSIZE] == 65_536
    assert (found[zmq.SNDHWM], found[zmq.RCVHWM], found[zmq.LINGER]) == (24, 24, 7)


def test_links_choose_queue_and_linger_by_their_kind(folder, server, closing):
    receiver, _ = neighbours(folder, closing, num_slots=3)
    assert receiver.socket.getsockopt(zmq.SNDHWM) == 4 * 3 + 16
    assert receiver.socket.getsockopt(zmq.LINGER) == 0
    assert server.socket.getsockopt(zmq.LINGER) == 500
