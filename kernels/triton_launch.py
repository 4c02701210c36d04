"""Small arithmetic that launches of Triton kernels share. Imports no Triton.

Triton launches on torch's current stream of the current device, which is where a stage's walk runs.
"""

import torch


def power_of_two(size: int) -> int:
    """Return the smallest power of two that is at least size, and at least 1."""
    return 1 << max(size - 1, 0).bit_length()


def shared_memory_bytes(device: torch.device) -> int:
    """Return the most shared memory that one program may take on a CUDA device."""
    card = torch.cuda.get_device_properties(device)
    return int(getattr(card, "shared_memory_per_block_optin", card.shared_memory_per_block))
