"""What a worker gets over its inherited descriptor channel, and under which labels.

The first packet is labelled BOOTSTRAP and carries, in this order, the descriptors of BOOTSTRAP_DESCRIPTORS.
Later packets carry one descriptor each: the slots of a link generation, or the logits file of a sequence.
"""

from dataclasses import dataclass

from strata_coord.ipc.errors import ProtocolError

BOOTSTRAP = b"bootstrap"
# record: the Bootstrap below; status: status page; tokens: token table; setup: assignment;
# arena: expert bytes; routing: rows per layer and expert
BOOTSTRAP_DESCRIPTORS = ("record", "status", "tokens", "setup", "arena", "routing")

_SLOTS = b"slots"
_LOGITS = b"logits"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bootstrap:
    """What a worker must know before it can say Hello."""

    launch: str
    secret: bytes  # 32 random bytes; signs every control message of the launch
    run_directory: str  # the launch's private folder, where its sockets are
    stage: int
    incarnation: int
    numa_node: int  # -1: not bound
    wants_self_binding: bool  # numactl could not; the worker sets affinity and policy itself
    max_sequences: int
    context_tokens: int
    setup_bytes: int
    arena_bytes: int  # 0: no arena, its descriptor is a placeholder of one byte
    routing_words: int  # layers of the stage x experts


def slots_label(link: int, generation: int) -> bytes:
    """The label of a link generation's slot memory."""
    return b"%b:%d:%d" % (_SLOTS, link, generation)


def logits_label(sequence: int, offset_bytes: int) -> bytes:
    """The label of the file that takes a sequence's logits, float32 rows from offset_bytes on."""
    return b"%b:%d:%d" % (_LOGITS, sequence, offset_bytes)


def parse_slots_label(label: bytes) -> tuple[int, int] | None:
    """Link and generation of a slots label, None for another kind of label."""
    return _two_numbers(label, _SLOTS)


def parse_logits_label(label: bytes) -> tuple[int, int] | None:
    """Sequence and offset of a logits label, None for another kind of label."""
    return _two_numbers(label, _LOGITS)


def _two_numbers(label: bytes, kind: bytes) -> tuple[int, int] | None:
    found, _, rest = label.partition(b":")
    if found != kind:
        return None
    numbers = rest.split(b":")
    if len(numbers) != 2 or not all(number.isdigit() for number in numbers):
        message = f"descriptor label with {len(numbers)} numbers, 2 are needed"
        raise ProtocolError(message)
    return int(numbers[0]), int(numbers[1])
