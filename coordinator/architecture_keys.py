"""Metadata under an architecture's prefix, and the limits that its sizes keep to."""

from strata_coord.coordinator.gguf_metadata import Metadata

MAX_LAYERS = 1_024
MAX_EXPERTS = 4_096
MAX_WIDTH = 1 << 20  # of hidden rows, experts, projections
MAX_HEADS = 4_096
MAX_CONTEXT = 1 << 30


class ArchitectureKeys:
    """The keys of one architecture; key names are given without its prefix."""

    def __init__(self, metadata: Metadata, architecture: str) -> None:
        self.metadata = metadata
        self.prefix = f"{architecture}."

    def integer(self, key: str, *, high: int, low: int = 1, default: int | None = None) -> int:
        """Return an integer of [low, high], or the default where the key is absent."""
        return self.metadata.integer(self.prefix + key, low=low, high=high, default=default)

    def number(self, key: str, *, low: float, high: float, default: float | None = None) -> float:
        """Return a finite number of [low, high], or the default where the key is absent."""
        return self.metadata.number(self.prefix + key, low=low, high=high, default=default)

    def per_layer(self, key: str, *, blocks: int, layers: int, low: int, high: int) -> tuple[int, ...]:
        """Return one integer per trunk layer; the array may also cover the MTP blocks after the trunk."""
        values = self.metadata.integers(self.prefix + key, low=low, high=high)
        if len(values) not in (blocks, layers):
            self.refuse(key, f"{len(values)} elements, expected {blocks}, one per block")
        return values[:layers]

    def has(self, key: str) -> bool:
        """Whether the file has the key."""
        return self.prefix + key in self.metadata

    def is_array(self, key: str) -> bool:
        """Whether the file has the key, and its value is not a single one."""
        value = self.metadata.get(self.prefix + key)
        return value is not None and not isinstance(value, int | float | str)

    def flag(self, key: str) -> bool:
        """Return a boolean, False where the key is absent."""
        return self.metadata.flag(self.prefix + key, default=False)

    def refuse(self, key: str, problem: str) -> None:
        """Raise ModelError about the key."""
        self.metadata.refuse(self.prefix + key, problem)
