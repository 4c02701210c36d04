"""A request as the control loop holds it, from its submission to the one entry that ends it."""

import os
import queue
from dataclasses import dataclass, field

from strata_coord.coordinator.plan import PromptPlan
from strata_coord.coordinator.request_meter import RequestFigures, RequestMeter
from strata_coord.coordinator.requests import GenerationEvent, GenerationFinished, GenerationRequest


@dataclass(slots=True, kw_only=True)
class Ending:
    """The last entry of a submission's events."""

    finished: GenerationFinished
    figures: RequestFigures | None


@dataclass(slots=True, kw_only=True)
class Submission:
    """A request and what belongs to it. The loop's thread writes, the caller reads events."""

    sequence: int
    request: GenerationRequest
    plan: PromptPlan
    meter: RequestMeter | None = None
    finished: GenerationFinished | None = None  # held back until every stage has reported the prompt
    logits_fd: int = -1
    events: "queue.SimpleQueue[GenerationEvent | Ending]" = field(default_factory=queue.SimpleQueue)

    def end(self, finished: GenerationFinished) -> None:
        """Give back what the request holds, and tell the caller last."""
        self.close_logits()
        meter = self.meter
        figures = meter.figures() if meter is not None and meter.is_complete else None
        self.events.put(Ending(finished=finished, figures=figures))

    def close_logits(self) -> None:
        """Close the logits file; the last stage has a descriptor of its own."""
        if self.logits_fd >= 0:
            os.close(self.logits_fd)
            self.logits_fd = -1
