"""The one interface to the pipeline for commands and servers: start, submit, stream, cancel, close.

An Engine owns a control loop in a thread of its own; every method here may be called from any thread. The
loop does all I/O, so a caller that is slow to read its events slows nobody down.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from strata_coord.coordinator.control_loop import ControlLoop
from strata_coord.coordinator.model_index import ModelIndex
from strata_coord.coordinator.plan import LaunchPlan, PromptPlan
from strata_coord.coordinator.requests import GenerationEvent, GenerationFinished, GenerationRequest
from strata_coord.coordinator.stage_facts import StageIdentity
from strata_coord.coordinator.submission import Ending, Submission
from strata_coord.coordinator.telemetry import DashboardState
from strata_coord.ipc.errors import RequestError, StrataError
from strata_coord.ipc.status_page import StatusEvent

if TYPE_CHECKING:
    from strata_coord.coordinator.request_meter import RequestFigures


@dataclass(frozen=True, slots=True, kw_only=True)
class Supervision:
    """How patient the engine is."""

    hang_s: float = 300.0
    start_s: float = 60.0


class Generation:
    """One submitted request."""

    def __init__(self, submission: Submission, loop: ControlLoop) -> None:
        self._submission = submission
        self._loop = loop
        self.figures: RequestFigures | None = None

    def events(self) -> Iterator[GenerationEvent]:
        """The events up to and with GenerationFinished, blocking for each."""
        while True:
            event = self._submission.events.get()
            if isinstance(event, Ending):
                self.figures = event.figures
                yield event.finished
                return
            yield event

    def cancel(self) -> None:
        """Give the request up. GenerationFinished still comes."""
        self._loop.cancel(self._submission.sequence)


class Engine:
    """Workers, pipeline and control loop of one launch."""

    def __init__(
        self, *, plan: LaunchPlan, model: ModelIndex, supervision: Supervision, debug_delay_s: float = 0.0
    ) -> None:
        """Prepare; start() begins. debug_delay_s: every stage sleeps that long per super-chunk."""
        self._plan = plan
        self._vocabulary = model.geometry.vocabulary_size
        self._loop = ControlLoop(
            plan=plan,
            model=model,
            hang_s=supervision.hang_s,
            start_s=supervision.start_s,
            debug_delay_s=debug_delay_s,
        )

    def start(self) -> None:
        """Start the workers; returns once every stage is loaded and linked.

        Raises:
            StageError: a stage did not come up.
            PlanError: the host cannot give the memory.
        """
        self._loop.start()
        failure = self._loop.wait_ready()
        if failure is not None:
            self.close()
            raise failure

    def submit(self, request: GenerationRequest, plan: PromptPlan) -> Generation:
        """Queue a request to be read as plan says.

        Raises:
            RequestError: it does not fit the context or the KV pool, or has an id that is no token.
            StageError: the pipeline is lost.
        """
        needed = len(request.prompt_ids) + request.max_tokens
        for limit, name in (
            (self._plan.context_tokens, "model.context_tokens"),
            (self._plan.kv_pool_tokens, "kv.pool_tokens"),
        ):
            if needed > limit:
                message = (
                    f"{len(request.prompt_ids)} prompt tokens and {request.max_tokens} of answer need room "
                    f"for {needed}, but {name} is {limit}"
                )
                raise RequestError(message)
        # Past the matrix of embeddings a stage would fail for everybody, or read what is not a row.
        if not request.prompt_ids:
            message = "the prompt is empty"
            raise RequestError(message)
        for token in (min(request.prompt_ids), max(request.prompt_ids)):
            if not 0 <= token < self._vocabulary:
                message = f"token id {token} is outside 0 to {self._vocabulary - 1}"
                raise RequestError(message)
        return Generation(self._loop.submit(request, plan), self._loop)

    def stages(self) -> tuple[StageIdentity, ...]:
        """Who runs the stages, once they are ready."""
        return self._loop.identities()

    def dashboard_state(self) -> DashboardState:
        """What a display shows at this moment."""
        return self._loop.dashboard_state()

    def new_spans(self, seen: Mapping[int, int]) -> list[tuple[int, list[StatusEvent]]]:
        """Per stage, the flight recorder's count so far and its spans from number seen[stage] on."""
        return self._loop.new_spans(seen)

    def show_text(self, text: str) -> None:
        """Let displays show a piece of the answer in progress."""
        self._loop.show_text(text)

    @property
    def failure(self) -> StrataError | None:
        """Why the pipeline is lost, if it is."""
        return self._loop.failure

    def close(self, *, grace_s: float = 2.0) -> list[str]:
        """End every worker and leave nothing behind; returns a line for each that had to be killed."""
        return self._loop.stop(grace_s)


def raise_if_failed(finished: GenerationFinished, engine: Engine) -> None:
    """Turn an unsuccessful end into the error that a command exits with.

    Raises:
        StageError: the pipeline was lost.
        RequestError: this request failed.
    """
    if finished.reason != "error":
        return
    if engine.failure is not None:
        raise engine.failure
    raise RequestError(finished.error)
