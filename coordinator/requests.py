"""What a caller asks of the engine, and what it hears back. Plain records."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from strata_coord.ipc.messages import SamplingSettings

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One prompt to read and the answer wanted from it."""

    prompt_ids: tuple[int, ...]
    max_tokens: int
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    stop_tokens: frozenset[int] = frozenset()
    logits_path: Path | None = None  # write the logits of every prompt position there, as .npy


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptProgress:
    """Rows of the prompt that the last stage has finished."""

    done_tokens: int
    total_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenGenerated:
    """One token of the answer. A stop token is reported too, so that the caller can count it."""

    token: int
    position: int
    logprob: float
    elapsed_s: float  # since acceptance


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationFinished:
    """The one terminal event of a request."""

    reason: FinishReason
    error: str = ""


GenerationEvent = PromptProgress | TokenGenerated | GenerationFinished
