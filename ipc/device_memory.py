"""Hand-off slots in device memory: plain cudaMalloc at the receiver, one legacy IPC handle to the sender.

Never memory of a caching allocator: a handle stands for the whole allocation it was cut from. A handle is 64
opaque bytes that travel once, inside the signed set-up of a link generation. CuPy is imported inside, so that
machines without CUDA load this module's users too.
"""

from dataclasses import dataclass

from strata_coord.ipc.errors import InvariantError, ProtocolError

HANDLE_BYTES = 64


@dataclass(slots=True)
class DeviceSlots:
    """The slots of one link generation as device addresses. Close before the device's context ends."""

    device: int  # CUDA ordinal of the memory's owner
    num_slots: int
    slot_bytes: int
    address: int
    is_owner: bool

    def slot_address(self, slot: int) -> int:
        """The device address of a slot.

        Raises:
            InvariantError: there is no such slot.
        """
        if not 0 <= slot < self.num_slots:
            message = f"slot {slot} of {self.num_slots}"
            raise InvariantError(message)
        return self.address + slot * self.slot_bytes

    def handle(self) -> bytes:
        """The handle under which another process opens these slots. The owner's to give, once."""
        from cupy.cuda import runtime

        return bytes(runtime.ipcGetMemHandle(self.address))

    def close(self) -> None:
        """Free the memory, or let go of it. CUDA asks that the importer closes before the owner frees."""
        from cupy.cuda import runtime

        if self.address == 0:
            return
        if self.is_owner:
            runtime.free(self.address)
        else:
            runtime.ipcCloseMemHandle(self.address)
        self.address = 0


def allocate_device_slots(device: int, num_slots: int, slot_bytes: int) -> DeviceSlots:
    """Take the slots of a link at the receiver; device must be the process's current one."""
    from cupy.cuda import runtime

    runtime.setDevice(device)
    address = int(runtime.malloc(num_slots * slot_bytes))
    return DeviceSlots(device, num_slots, slot_bytes, address, is_owner=True)


def open_device_slots(device: int, num_slots: int, slot_bytes: int, handle: bytes) -> DeviceSlots:
    """Open the receiver's slots at the sender, with the sender's own device current.

    Opened while the owner's device is current, the same bytes would arrive at a tenth of the rate, bounced
    through the host, so the device is set here and not left to the caller.

    Raises:
        ProtocolError: the handle is not one.
    """
    from cupy.cuda import runtime

    if len(handle) != HANDLE_BYTES:
        message = f"device memory handle of {len(handle)} bytes, {HANDLE_BYTES} are needed"
        raise ProtocolError(message)
    runtime.setDevice(device)
    address = int(runtime.ipcOpenMemHandle(handle, runtime.cudaIpcMemLazyEnablePeerAccess))
    return DeviceSlots(device, num_slots, slot_bytes, address, is_owner=False)
