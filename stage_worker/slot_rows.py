"""Hand-off slots as tensors: the same rows over shared host memory or over device memory."""

from typing import Protocol

import numpy as np
import torch

from strata_coord.ipc.device_memory import DeviceSlots
from strata_coord.ipc.host_memory import MappedSlots

BYTES_PER_VALUE = 4  # rows cross in fp32, so that any number of stages computes the same


class SlotRows(Protocol):
    """The slots of one link, as this side sees them."""

    def view(self, slot: int, rows: int) -> torch.Tensor:
        """fp32 [rows, row_width] over the first bytes of a slot."""


class HostSlotRows:
    """Slots in a memfd that both stages map: the route that works everywhere."""

    def __init__(self, slots: MappedSlots, row_width: int) -> None:
        self._slots = slots
        self._row_width = row_width

    def view(self, slot: int, rows: int) -> torch.Tensor:
        """fp32 [rows, row_width], host memory."""
        data = self._slots.slot(slot)[: rows * self._row_width * BYTES_PER_VALUE]
        return torch.from_numpy(np.frombuffer(data, dtype=np.float32)).view(rows, self._row_width)


class DeviceSlotRows:
    """Slots in the receiver's device memory, reached directly by both stages."""

    def __init__(self, slots: DeviceSlots, row_width: int) -> None:
        self._slots = slots
        self._row_width = row_width

    def view(self, slot: int, rows: int) -> torch.Tensor:
        """fp32 [rows, row_width], device memory."""
        import cupy

        num_bytes = rows * self._row_width * BYTES_PER_VALUE
        memory = cupy.cuda.UnownedMemory(self._slots.slot_address(slot), num_bytes, self, self._slots.device)
        array = cupy.ndarray((rows, self._row_width), cupy.float32, cupy.cuda.MemoryPointer(memory, 0))
        return torch.as_tensor(array, device=torch.device("cuda", self._slots.device))
