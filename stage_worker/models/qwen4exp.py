"""qwen4exp: residual streams, DeltaNet and sparse attention, shared expert, n-gram embedding.

R = embedding, once per stream
per layer:  R += PLE(R, ids), where the layer has it
x, m = read(R, hc_attn);  R_s += m_s Mixer(x)
x, m = read(R, hc_ffn);   R_s += m_s MoE(x)
head:       output(read(R, output_hc))
"""

from collections.abc import Mapping, Sequence

from torch import Tensor

from strata_coord.ipc.assignment import HyperConnectionGeometry, ModelGeometry
from strata_coord.ipc.errors import InvariantError, ModelError
from strata_coord.kernels.hyper import write_streams
from strata_coord.stage_worker.models.attention import Attention, Rotary
from strata_coord.stage_worker.models.experts import Experts
from strata_coord.stage_worker.models.family import (
    ExpertHalfInput,
    ExpertMlp,
    LayerWeights,
    Mixer,
    NgramTable,
    SegmentRows,
    TensorShapes,
)
from strata_coord.stage_worker.models.gated_delta_net import GatedDeltaNet
from strata_coord.stage_worker.models.hyper_connections import HyperConnection
from strata_coord.stage_worker.models.ngram_embedding import NgramEmbedding
from strata_coord.stage_worker.models.sparse_attention import SparseAttention
from strata_coord.stage_worker.sequence_state import PAGE_TOKENS


class HyperConnectedLayer:
    """A layer that reads from and writes to several residual streams."""

    def __init__(
        self,
        geometry: ModelGeometry,
        hyper: HyperConnectionGeometry,
        index: int,
        mixer: Mixer,
        ngram: NgramEmbedding | None,
    ) -> None:
        self.index = index
        self.mixer = mixer
        self.ngram = ngram
        self.experts = Experts(geometry, index)
        self.attention_streams = HyperConnection(geometry, hyper, "hc_attn", layer=index, writes=True)
        self.expert_streams = HyperConnection(geometry, hyper, "hc_ffn", layer=index, writes=True)

    def dense_tensors(self) -> TensorShapes:
        """Return suffix -> torch shape."""
        return {
            **(self.ngram.tensors() if self.ngram is not None else {}),
            **self.attention_streams.tensors(),
            **self.mixer.tensors(),
            **self.expert_streams.tensors(),
            **self.experts.tensors(),
        }

    def attention_half(
        self, rows_TW: Tensor, segments: Sequence[SegmentRows], weights: LayerWeights
    ) -> ExpertHalfInput:
        """Run the n-gram embedding, mixer and router; rows take the first two's results in place."""
        if self.ngram is not None:
            self.ngram.add_to(rows_TW, segments, weights)
        x_TD, write_TN = self.attention_streams.read(rows_TW, weights)
        write_streams(rows_TW, self.mixer.mix(x_TD, segments, weights), _written(write_TN))
        x_TD, write_TN = self.expert_streams.read(rows_TW, weights)
        return self.experts.route(x_TD, write_TN, weights)

    def shared_expert(self, x_TD: Tensor, weights: LayerWeights) -> Tensor | None:
        """Return the shared expert's result."""
        return self.experts.shared(x_TD, weights)

    def expert_mlp(self, weights: LayerWeights) -> ExpertMlp:
        """Return the formula of the routed experts."""
        return self.experts.mlp(weights)

    def combine(self, rows_TW: Tensor, routed_TD: Tensor, half: ExpertHalfInput) -> None:
        """Write the experts' sum to the streams with the weights read before them."""
        if half.shared_TD is not None:
            routed_TD = routed_TD + half.shared_TD
        write_streams(rows_TW, routed_TD, _written(half.write_TN))


def _written(write_TN: Tensor | None) -> Tensor:
    if write_TN is None:
        message = "a layer half of a model with residual streams has no write weights"
        raise InvariantError(message)
    return write_TN


class Qwen4Exp:
    """The qwen4exp family."""

    def __init__(
        self, geometry: ModelGeometry, hyper: HyperConnectionGeometry, table: NgramTable | None
    ) -> None:
        self.geometry = geometry
        self.hyper = hyper
        self._table = table
        attention = geometry.attention
        self._rotary = Rotary(attention.rope_dims, attention.rope_base, yarn=attention.yarn)
        self.layers = tuple(
            HyperConnectedLayer(geometry, hyper, index, self._mixer(index), self._ngram(index))
            for index in range(geometry.num_layers)
        )
        self._head = HyperConnection(geometry, hyper, "output_hc", layer=geometry.num_layers, writes=False)

    def _mixer(self, index: int) -> Mixer:
        geometry = self.geometry
        if geometry.recurrent_layers[index]:
            if geometry.delta_net is None:
                message = f"qwen4exp: layer {index} is recurrent, but the model has no ssm.* sizes"
                raise ModelError(message)
            return GatedDeltaNet(geometry, geometry.delta_net, index)
        sparse = geometry.sparse_attention
        if sparse is None or sparse.compress_ratios[index] == 0:
            return Attention(geometry, index, self._rotary)
        ratio = sparse.compress_ratios[index]
        if sparse.budget_tokens % ratio or PAGE_TOKENS % ratio:
            message = (
                f"qwen4exp: layer {index}: compress ratio {ratio} must divide the budget of "
                f"{sparse.budget_tokens} and a page of {PAGE_TOKENS} tokens"
            )
            raise ModelError(message)
        return SparseAttention(geometry, sparse, index, self._rotary)

    def _ngram(self, index: int) -> NgramEmbedding | None:
        ngram = self.geometry.ngram
        if ngram is None or index not in ngram.layers:
            return None
        return NgramEmbedding(self.geometry, ngram, self.hyper, index, self._table)

    def embed(self, embeddings_TD: Tensor) -> Tensor:
        """Return one copy of the embedding per stream."""
        return embeddings_TD.repeat(1, self.hyper.num_streams)

    def head_tensors(self) -> TensorShapes:
        """Return full name -> torch shape."""
        return self._head.tensors()

    def head(self, rows_TW: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        """Return the mixed streams."""
        return self._head.read(rows_TW, weights)[0]


def build_qwen4exp(geometry: ModelGeometry, table: NgramTable | None) -> Qwen4Exp:
    """Return the family for a model's sizes.

    Raises:
        ModelError: sizes that the architecture cannot do without are missing or do not fit each other.
    """
    if geometry.hyper_connections is None:
        message = "qwen4exp: the model has no hyper_connection.* sizes"
        raise ModelError(message)
    if geometry.ngram is not None and len(geometry.ngram.layers) > 1:
        # One set of multipliers and offsets in the file cannot say which of several layers it belongs to.
        message = f"qwen4exp: {len(geometry.ngram.layers)} layers have an n-gram embedding; 1 is supported"
        raise ModelError(message)
    return Qwen4Exp(geometry, geometry.hyper_connections, table)
