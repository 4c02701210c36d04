"""PLE: hashed n-gram rows, gated per residual stream, with a short dilated convolution over time.

The table is far larger than memory, so its rows are read one by one through an NgramTable.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from strata_coord.ipc.assignment import HyperConnectionGeometry, ModelGeometry, NgramGeometry
from strata_coord.ipc.errors import ModelError
from strata_coord.kernels.causal_conv import causal_conv_silu
from strata_coord.kernels.linear import linear
from strata_coord.kernels.ngram import ngram_rows
from strata_coord.kernels.norm import group_rms_norm
from strata_coord.stage_worker.models.family import (
    LayerWeights,
    NgramTable,
    SegmentRows,
    TensorShapes,
    require_tensor,
)

GATE_FLOOR = 1e-6


class NgramEmbedding:
    """The n-gram embedding of one layer."""

    def __init__(
        self,
        geometry: ModelGeometry,
        ngram: NgramGeometry,
        hyper: HyperConnectionGeometry,
        layer: int,
        table: NgramTable | None,
    ) -> None:
        self.ngram = ngram
        self.num_streams = hyper.num_streams
        self.hidden_size = geometry.hidden_size
        self.width = geometry.row_width
        self.eps = geometry.rms_epsilon
        self.layer = layer
        self.table = table
        self.embedding_width = len(ngram.head_vocab_sizes) * ngram.row_width

    def tensors(self) -> TensorShapes:
        """Return suffix -> torch shape, the table itself left out."""
        return {
            "ple_key.weight": (self.width, self.embedding_width),
            "ple_value.weight": (self.hidden_size, self.embedding_width),
            "ple_norm_key.weight": (self.width,),
            "ple_norm_query.weight": (self.width,),
            "ple_norm_conv.weight": (self.width,),
            "ple_conv1d.weight": (self.width, self.ngram.conv_kernel),
        }

    def add_to(self, rows_TW: Tensor, segments: Sequence[SegmentRows], weights: LayerWeights) -> None:
        """Add the embedding to the rows in place; the convolution history of each segment moves on.

        Raises:
            ModelError: this stage was given no n-gram table.
        """

        def weight(name: str) -> Tensor:
            return require_tensor(weights, f"ple_{name}.weight", self.layer)

        rows, streams = rows_TW.shape[0], self.num_streams
        e_TE = self._embeddings(segments).to(rows_TW.device)
        k = group_rms_norm(linear(e_TE, weight("key")), weight("norm_key"), streams, self.eps)
        q = group_rms_norm(rows_TW, weight("norm_query"), streams, self.eps)
        dot_TN = (k * q).view(rows, streams, -1).sum(-1) / math.sqrt(self.hidden_size)
        gate_TN = torch.sigmoid_(dot_TN.sign() * dot_TN.abs().clamp_min(GATE_FLOOR).sqrt())
        v_TD = linear(e_TE, weight("value"))
        y_TW = (gate_TN.unsqueeze(-1) * v_TD.unsqueeze(1)).view(rows, -1)
        u_TW = group_rms_norm(y_TW, weight("norm_conv"), streams, self.eps)
        rows_TW.add_(y_TW)
        for segment in segments:
            here = slice(segment.start, segment.stop)
            history = segment.state.ngram_conv(self.layer)
            rows_TW[here].add_(
                causal_conv_silu(u_TW[here], history, weight("conv1d"), dilation=self.ngram.ngram_size)
            )

    def _embeddings(self, segments: Sequence[SegmentRows]) -> Tensor:
        if self.table is None:
            message = f"layer {self.layer}: the n-gram table per_layer_token_embd.weight is missing"
            raise ModelError(message)
        ids = torch.cat(
            [
                ngram_rows(
                    segment.token_ids,
                    segment.first_position,
                    eos_token=self.ngram.eos_token,
                    multipliers=self.ngram.multipliers,
                    head_vocab_sizes=self.ngram.head_vocab_sizes,
                    head_offsets=self.ngram.head_offsets,
                )
                for segment in segments
            ]
        )
        return self.table.rows(ids.flatten()).view(ids.shape[0], self.embedding_width)
