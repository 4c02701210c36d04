"""Keeps a second launch off a GPU that a first one has planned with, by a lock file per card."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strata_coord.ipc.endpoints import NamedLock
from strata_coord.ipc.errors import AlreadyRunningError

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Sequence

    from strata_coord.coordinator.config import Config

__all__ = ["exclusive_cards", "lock_cards"]


def exclusive_cards(config: Config, uuids: Sequence[str]) -> tuple[str, ...]:
    """Return the cards that no other launch may use beside this one, by UUID, in one order for all launches.

    Where every stage on a card names its budget, sharing the card is deliberate. Else the plan takes what is
    free, and a second launch would plan with memory that the first is about to take.

    Args:
        config: The launch's.
        uuids: Of each stage's card; "" on the CPU.
    """
    stages = zip(uuids, config.stage, strict=False)  # a saved plan may have other stages than the file
    return tuple(sorted({uuid for uuid, settings in stages if uuid and settings.vram_budget_mib is None}))


def lock_cards(locks: contextlib.ExitStack, config: Config, uuids: Sequence[str]) -> bool:
    """Lock the exclusive cards until locks is closed; return whether there are any.

    Raises:
        AlreadyRunningError: Another launch of this user has one; names its process.
    """
    cards = exclusive_cards(config, uuids)
    for uuid in cards:
        try:
            locks.enter_context(NamedLock(uuid.lower()))
        except AlreadyRunningError as error:
            message = f"{error}; to share the card, set stage.N.vram_budget_mib for every stage on it"
            raise AlreadyRunningError(message) from None
    return bool(cards)
