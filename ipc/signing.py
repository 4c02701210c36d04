"""HMAC and message number of every frame, sans I/O: one Signer at one end, one Verifier at the other.

The tag covers launch, link, generation, direction, message number, the length of every frame and all frames.
So a message cannot be forged, changed, moved to another link or generation, sent back to its sender, cut at
another place, repeated, dropped or reordered without being noticed.
"""

import hashlib
import hmac
import struct
from collections.abc import Sequence

from strata_coord.ipc.errors import InvariantError, ProtocolError

SECRET_BYTES = 32
_NUMBER = struct.Struct(">Q")
HEADER_BYTES = _NUMBER.size + hashlib.sha256().digest_size


class _Channel:
    """One direction of one generation of one link."""

    def __init__(self, secret: bytes, *, launch: str, link: str, generation: int, direction: str) -> None:
        if len(secret) != SECRET_BYTES:
            message = f"secret of {len(secret)} bytes, {SECRET_BYTES} are needed"
            raise InvariantError(message)
        self._keyed = hmac.new(secret, digestmod=hashlib.sha256)
        for text in (launch, link, direction):
            data = text.encode()
            self._keyed.update(_NUMBER.pack(len(data)) + data)
        self._keyed.update(_NUMBER.pack(generation))
        self.next_number = 0

    def _tag(self, number: bytes, frames: Sequence[bytes]) -> bytes:
        keyed = self._keyed.copy()
        keyed.update(number)
        keyed.update(b"".join(_NUMBER.pack(len(frame)) for frame in (*frames, b"")))
        for frame in frames:
            keyed.update(frame)
        return keyed.digest()


class Signer(_Channel):
    """The sending end."""

    def header(self, *frames: bytes) -> bytes:
        """Return the header of the next message. Call sent() once the message has left."""
        number = _NUMBER.pack(self.next_number)
        return number + self._tag(number, frames)

    def sent(self) -> None:
        """Count the message; one that could not be sent leaves no gap."""
        self.next_number += 1


class Verifier(_Channel):
    """The receiving end."""

    def accepts(self, header: bytes, *frames: bytes) -> bool:
        """Return whether the message is authentic; if so, it is the next one.

        Raises:
            ProtocolError: authentic, but not the next one: messages were lost, repeated or reordered.
        """
        if len(header) != HEADER_BYTES:
            return False
        number = header[: _NUMBER.size]
        if not hmac.compare_digest(header[_NUMBER.size :], self._tag(number, frames)):
            return False
        found = _NUMBER.unpack(number)[0]
        if found != self.next_number:
            message = f"message number {found} where {self.next_number} is due"
            raise ProtocolError(message)
        self.next_number += 1
        return True
