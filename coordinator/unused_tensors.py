"""Tensors of the trunk that nothing asked for. Each is a part of the model that would be left out unnoticed.

A file that other engines load has no such tensor, except those named here.
"""

from collections.abc import Iterable, Sequence

from strata_coord.coordinator.gguf_metadata import Metadata
from strata_coord.coordinator.printable import printable

_NAMES_SHOWN = 5
_VISION = ("v.", "mm.", "a.")  # image encoder, projector, audio encoder
_SCALES = (".scale", ".input_scale")
# A file whose compress ratios are 0 may still bring the indexers of its attention layers: they are dense.
_HARMLESS = ".indexer."


def refuse_unused(metadata: Metadata, names: Iterable[str]) -> None:
    """Refuse the file if a tensor among names matters.

    Args:
        metadata: The file's keys, for the message.
        names: The trunk's tensors that fill no slot.

    Raises:
        ModelError: There is one; the message names the feature, or up to five tensors.
    """
    unused = [name for name in names if _HARMLESS not in name]
    if not unused:
        return
    for name in unused:
        if name.startswith(_VISION):
            metadata.refuse(f"tensor {name}", "images are not supported; give a file of the text model alone")
        if name.endswith(_SCALES):
            metadata.refuse(f"tensor {name}", "per-tensor scales (NVFP4) are not supported")
    metadata.refuse("tensors", f"{len(unused)} that this architecture does not have: {_listed(unused)}")


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(printable(name) for name in names[:_NAMES_SHOWN])
    more = len(names) - _NAMES_SHOWN
    return f"{shown} and {more} more" if more > 0 else shown
