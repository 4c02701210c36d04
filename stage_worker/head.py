"""The last stage's end of the walk: output norm, head, sampling, and the logits file of a request.

The output matrix is expanded a block of vocabulary rows at a time, so its expanded form is never whole.
"""

import os
from collections.abc import Callable

import torch

from strata_coord.ipc.messages import NOT_FINITE, SampledToken, SamplingSettings, Segment, SuperChunk
from strata_coord.kernels import sampling
from strata_coord.kernels.linear import linear
from strata_coord.stage_worker.dense import DenseWeights
from strata_coord.stage_worker.models.family import Family

VOCABULARY_BLOCK_ROWS = 8192  # 8192 x 2560 fp32 = 80 MiB of scratch at the largest hidden size we know

HEAD_GROUP = "head"  # norms and mixers before the output matrix
OUTPUT_GROUP = "output"  # the output matrix alone


class Head:
    """Turns final residual rows into logits and tokens."""

    def __init__(
        self, *, family: Family, dense: DenseWeights, advance: Callable[[], None] = lambda: None
    ) -> None:
        """Build the head.

        dense has the groups HEAD_GROUP and OUTPUT_GROUP. advance: called after each block of the vocabulary.
        """
        self._advance = advance
        self._family = family
        self._dense = dense
        self._vocabulary = dense.num_rows(OUTPUT_GROUP)

    def logits(self, rows_TW: torch.Tensor) -> torch.Tensor:
        """fp32 [T, vocabulary] of residual rows fp32 [T, row width]."""
        x_TD = self._family.head(rows_TW, self._dense.expand(HEAD_GROUP))
        logits_TV = torch.empty(x_TD.shape[0], self._vocabulary, device=x_TD.device)
        for start in range(0, self._vocabulary, VOCABULARY_BLOCK_ROWS):
            stop = min(start + VOCABULARY_BLOCK_ROWS, self._vocabulary)
            block = self._dense.rows(OUTPUT_GROUP, slice(start, stop))
            logits_TV[:, start:stop] = linear(x_TD, block)
            self._advance()
        return logits_TV

    def sample(self, super_chunk: SuperChunk, rows_SW: torch.Tensor) -> list[SampledToken]:
        """The next token of every segment that asks for one, from its last row.

        A row whose logits are not finite gives the token NOT_FINITE: its request fails, the others go on.
        """
        wanted: list[tuple[Segment, SamplingSettings, int]] = []
        end = 0
        for segment in super_chunk.segments:
            end += segment.count
            if segment.sample is not None:
                wanted.append((segment, segment.sample, end - 1))
        if not wanted:
            return []
        logits_NV = self.logits(rows_SW[[row for _, _, row in wanted]])
        return [
            self._draw(segment, settings, logits_V)
            for (segment, settings, _), logits_V in zip(wanted, logits_NV, strict=True)
        ]

    def _draw(self, segment: Segment, settings: SamplingSettings, logits_V: torch.Tensor) -> SampledToken:
        position = segment.first_position + segment.count
        if not bool(torch.isfinite(logits_V).all()):
            return SampledToken(sequence=segment.sequence, position=position, token=NOT_FINITE, logprob=0.0)
        token, logprob = sampling.sample(
            logits_V,
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            min_p=settings.min_p,
            seed=settings.seed,
            position=position,
            num_real_tokens=self._family.geometry.num_real_tokens,
        )
        return SampledToken(sequence=segment.sequence, position=position, token=token, logprob=logprob)

    def write_logits(
        self, super_chunk: SuperChunk, rows_SW: torch.Tensor, files: dict[int, tuple[int, int]]
    ) -> None:
        """Write the logits of every row of the segments that ask for it.

        files: sequence -> (descriptor, byte offset of position 0) of a float32 [tokens, vocabulary] array.
        """
        start = 0
        for segment in super_chunk.segments:
            stop = start + segment.count
            if segment.logits:
                descriptor, base = files[segment.sequence]
                self._write_rows(segment, rows_SW[start:stop], descriptor, base, super_chunk.sub_chunk_tokens)
            start = stop

    def _write_rows(
        self, segment: Segment, rows_TW: torch.Tensor, descriptor: int, base: int, step: int
    ) -> None:
        row_bytes = 4 * self._vocabulary
        for start in range(0, rows_TW.shape[0], step):
            data = self.logits(rows_TW[start : start + step]).cpu().numpy().data.cast("B")
            offset = base + (segment.first_position + start) * row_bytes
            done = 0
            while done < len(data):
                done += os.pwrite(descriptor, data[done:], offset + done)
