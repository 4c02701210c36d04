import pytest

from strata_coord.ipc.errors import InvariantError, ProtocolError
from strata_coord.ipc.signing import HEADER_BYTES, Signer, Verifier

SECRET = bytes(range(32))
CHANNEL = {"launch": "abc", "link": "link-0", "generation": 1, "direction": "down"}


def pair(**changes):
    return Signer(SECRET, **CHANNEL), Verifier(SECRET, **(CHANNEL | changes))


def signed(signer, *frames):
    header = signer.header(*frames)
    signer.sent()
    return header


def test_messages_in_order_are_accepted():
    signer, verifier = pair()
    for body in (b"one", b"", b"three"):
        assert verifier.accepts(signed(signer, body), body)


@pytest.mark.parametrize(
    "changes", [{"launch": "abd"}, {"link": "link-1"}, {"generation": 2}, {"direction": "up"}], ids=str
)
def test_a_message_of_another_channel_is_not_authentic(changes):
    signer, verifier = pair(**changes)
    assert not verifier.accepts(signed(signer, b"body"), b"body")


def test_another_secret_is_not_authentic():
    signer = Signer(bytes(32), **CHANNEL)
    assert not Verifier(SECRET, **CHANNEL).accepts(signed(signer, b"body"), b"body")


@pytest.mark.parametrize("place", range(HEADER_BYTES))
def test_every_byte_of_the_header_counts(place):
    signer, verifier = pair()
    header = bytearray(signed(signer, b"body"))
    header[place] ^= 1
    assert not verifier.accepts(bytes(header), b"body")


@pytest.mark.parametrize("size", [0, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 1])
def test_a_header_of_another_size_or_of_zeros_is_not_authentic(size):
    assert not pair()[1].accepts(bytes(size), b"body")


def test_frames_cannot_be_cut_at_another_place():
    signer, verifier = pair()
    header = signed(signer, b"ab", b"c")
    assert not verifier.accepts(header, b"a", b"bc")
    assert not verifier.accepts(header, b"abc")
    assert verifier.accepts(header, b"ab", b"c")


def test_link_and_launch_cannot_be_cut_at_another_place():
    signer = Signer(SECRET, **(CHANNEL | {"launch": "ab", "link": "clink-0"}))
    assert not pair()[1].accepts(signed(signer, b"body"), b"body")


def test_a_lost_or_repeated_message_is_noticed():
    signer, verifier = pair()
    first, second = signed(signer, b"1"), signed(signer, b"2")
    with pytest.raises(ProtocolError, match="message number 1 where 0 is due"):
        verifier.accepts(second, b"2")
    assert verifier.accepts(first, b"1")
    with pytest.raises(ProtocolError, match="message number 0 where 1 is due"):
        verifier.accepts(first, b"1")


def test_a_message_that_could_not_be_sent_leaves_no_gap():
    signer, verifier = pair()
    signer.header(b"not sent")
    assert verifier.accepts(signed(signer, b"sent"), b"sent")


def test_a_short_secret_is_refused():
    with pytest.raises(InvariantError, match="31 bytes, 32"):
        Signer(SECRET[:31], **CHANNEL)
