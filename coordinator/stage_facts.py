"""Who runs a stage: what its worker said of itself at start. A plain record for reports and displays."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StageIdentity:
    """One running stage."""

    stage: int
    pid: int
    device: str
    numa_node: int  # -1: not bound
    binding: str  # "numactl", "self", "cpu-only" or "none"
    route: str | None  # of the link to the next stage; None for the last
    first_layer: int
    last_layer: int  # exclusive
    load_file_read: int
    load_seconds: float
    notes: tuple[str, ...] = ()  # what it had to do without
