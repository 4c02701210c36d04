"""The residual streams of a layer half: which tensors read and write them."""

from collections.abc import Mapping

from torch import Tensor

from strata_coord.ipc.assignment import HyperConnectionGeometry, ModelGeometry
from strata_coord.kernels.hyper import read_streams
from strata_coord.stage_worker.models.family import TensorShapes, require_tensor


class HyperConnection:
    """One read of the streams. prefix is "hc_attn", "hc_ffn" or, in the head, "output_hc"."""

    def __init__(
        self,
        geometry: ModelGeometry,
        hyper: HyperConnectionGeometry,
        prefix: str,
        *,
        layer: int,
        writes: bool,
    ) -> None:
        self.hyper = hyper
        self.width = geometry.row_width
        self.eps = geometry.rms_epsilon
        self.prefix = prefix
        self.layer = layer
        self.writes = writes

    def tensors(self) -> TensorShapes:
        """Return name -> torch shape."""
        shapes: dict[str, tuple[int, ...]] = {
            f"{self.prefix}_norm.weight": (self.width,),
            f"{self.prefix}_down.weight": (self.hyper.low_rank, self.width),
            f"{self.prefix}_up.weight": (self.width, self.hyper.low_rank),
        }
        if self.writes:
            shapes[f"{self.prefix}_inject.weight"] = (self.hyper.num_streams, self.width)
        return shapes

    def read(self, rows_TW: Tensor, weights: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        """Return the mixed input [T, D] and the write weights [T, N], None in the head."""

        def weight(part: str) -> Tensor:
            return require_tensor(weights, f"{self.prefix}_{part}.weight", self.layer)

        return read_streams(
            rows_TW,
            weight("norm"),
            weight("down"),
            weight("up"),
            weight("inject") if self.writes else None,
            num_streams=self.hyper.num_streams,
            eps=self.eps,
        )
