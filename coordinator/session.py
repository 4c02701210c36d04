"""One launch seen from the user: prompts in, answers out, one report.

Knows the tokenizer, the chat template and the terminal; asks the engine for everything else.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from strata_coord.coordinator.engine import Engine, raise_if_failed
from strata_coord.coordinator.launch_options import LaunchOptions
from strata_coord.coordinator.launch_report import RequestResult, StageResult, launch_report
from strata_coord.coordinator.output import named_stdout, print_json
from strata_coord.coordinator.plan import PromptPlan
from strata_coord.coordinator.prompt_planner import plan_prompt
from strata_coord.coordinator.request_meter import RequestFigures, needed_bytes_once
from strata_coord.coordinator.requests import (
    GenerationFinished,
    GenerationRequest,
    PromptProgress,
    TokenGenerated,
)
from strata_coord.coordinator.signals import DRAIN, Terminated
from strata_coord.ipc.errors import ConfigError, InvariantError, RequestError
from strata_coord.ipc.messages import SamplingSettings

if TYPE_CHECKING:
    from strata_coord.coordinator.launch import Prepared
    from strata_coord.coordinator.screen import Screen
    from strata_coord.coordinator.tokenizer import Tokenizer

MAX_PROMPT_BYTES = 64 << 20  # far above any context; a wrong file is refused before it is tokenised
PROMPT_MARK = "> "


@dataclass(slots=True, kw_only=True)
class Answer:
    """What came of one prompt."""

    text: str = ""
    generated_tokens: int = 0
    reason: str = ""
    total_s: float = 0.0


class Session:
    """Prompts and answers of one launch."""

    def __init__(self, *, options: LaunchOptions, prepared: "Prepared", screen: "Screen") -> None:
        self._options = options
        self._config = prepared.config
        self._model = prepared.model
        self._plan = prepared.plan
        self._screen = screen
        self._tokenizer = self._load_tokenizer()
        self._notices: set[str] = set()

    # --- prompts -----------------------------------------------------------------------------------------

    def first_prompt(self) -> tuple[int, ...] | None:
        """The token ids of the one prompt that the options give, or None for a prompt loop.

        Raises:
            ConfigError: the prompt's file cannot be read or holds no prompt.
            RequestError: the prompt cannot be encoded, or is too long.
        """
        options = self._options
        if not options.has_prompt:
            return None
        if options.prompt_ids is not None:
            ids = self._read_ids(options.prompt_ids)
        else:
            ids = self._encode(self._prompt_text())
        return self._fitting(ids)

    def _fitting(self, ids: list[int]) -> tuple[int, ...]:
        """The ids; a prompt that fills the context would get an answer of no tokens."""
        room = self._plan.context_tokens
        if len(ids) >= room:
            message = (
                f"the prompt has {len(ids)} tokens, but model.context_tokens leaves room for {room - 1} "
                "and one of answer"
            )
            raise RequestError(message)
        return tuple(ids)

    def _prompt_text(self) -> str:
        options = self._options
        if options.prompt is not None:
            return _not_empty("--prompt", options.prompt)
        if options.prompt_file is not None:
            name, data = str(options.prompt_file), _read_file(options.prompt_file)
        else:
            name, data = "standard input", sys.stdin.buffer.read(MAX_PROMPT_BYTES + 1)
        if len(data) > MAX_PROMPT_BYTES:
            message = f"{name}: longer than {MAX_PROMPT_BYTES} bytes"
            raise ConfigError(message)
        try:
            return _not_empty(name, data.decode("utf-8-sig"))  # some editors put a mark before the text
        except UnicodeDecodeError as error:
            message = f"{name}: not UTF-8 text, byte {error.start}"
            raise ConfigError(message) from None

    def _read_ids(self, path: Path) -> list[int]:
        try:
            value: object = json.loads(_read_file(path))
        except ValueError as error:
            message = f"{path}: not a JSON list of token ids: {error}"
            raise ConfigError(message) from None
        limit = self._model.geometry.vocabulary_size
        if not isinstance(value, list) or not value:
            message = f"{path}: expected a JSON list of at least one token id"
            raise ConfigError(message)
        for place, token in enumerate(value):
            if type(token) is not int or not 0 <= token < limit:
                message = f"{path}: entry {place} is {token!r:.40}, expected a token id from 0 to {limit - 1}"
                raise ConfigError(message)
        return list(value)

    def _encode(self, text: str) -> list[int]:
        tokenizer = self._need_tokenizer()
        if self._options.raw:
            ids = tokenizer.encode(text, allow_special=False)
        else:
            from strata_coord.coordinator.chat_template import chat_prompt

            prompt = chat_prompt(
                self._chat_template(),
                [{"role": "user", "content": text}],
                token_names=tokenizer.template_names,
                guard=tokenizer.guard,
            )
            if prompt.notice is not None and prompt.notice not in self._notices:
                self._notices.add(prompt.notice)
                self._screen.note(prompt.notice)
            ids = tokenizer.encode(prompt.text, allow_special=True, mark=prompt.mark)
        if not ids:
            message = "the prompt is empty"
            raise RequestError(message)
        return ids

    # --- answers -----------------------------------------------------------------------------------------

    def run(self, engine: Engine, prompt: tuple[int, ...] | None) -> int:
        """Answer the one prompt, or prompts from standard input until it ends. Returns the exit code."""
        if prompt is not None:
            self._answer(engine, prompt)
            return 0
        return self._loop(engine)

    def _loop(self, engine: Engine) -> int:
        screen = self._screen
        screen.refresh()
        screen.note("ready: one prompt a line, each by itself; Ctrl-C stops an answer, Ctrl-D ends")
        while True:
            screen.hide()  # the terminal is the user's while they type
            if sys.stdin.isatty():
                print(PROMPT_MARK, end="", file=sys.stderr, flush=True)
            line = sys.stdin.readline()
            if not line:
                return 0
            if not line.strip():
                continue
            try:
                prompt = self._fitting(self._encode(line.rstrip("\n")))
                screen.show(engine)
                self._answer(engine, prompt)
            except RequestError as error:  # the next prompt may be fine
                screen.hide()
                print(f"strata-coord: {error}", file=sys.stderr)
            except KeyboardInterrupt:
                if not sys.stdin.isatty():
                    raise
                screen.note("stopped; Ctrl-C at the prompt ends")

    def _answer(self, engine: Engine, prompt: tuple[int, ...]) -> None:
        plan = plan_prompt(self._plan, len(prompt), mode=self._options.mode or self._config.prefill.mode)
        self._screen.refresh()
        self._screen.note(f"{len(prompt):,} tokens: {plan.reason}; experts by {plan.upload}")
        limits = {
            "model.context_tokens": self._plan.context_tokens,
            "kv.pool_tokens": self._plan.kv_pool_tokens,
        }
        key = min(limits, key=limits.__getitem__)  # the first of equals
        room = limits[key] - len(prompt)
        if room < self._options.max_tokens:
            wanted = self._options.max_tokens
            self._screen.note(f"{key} leaves the answer room for {room:,} of the {wanted:,} tokens allowed")
        request = GenerationRequest(
            prompt_ids=prompt,
            max_tokens=min(self._options.max_tokens, room),
            sampling=self._sampling(),
            stop_tokens=self._tokenizer.stop_tokens if self._tokenizer is not None else frozenset(),
            logits_path=self._options.logits,
        )
        generation = engine.submit(request, plan)
        answer = Answer()
        printer = _Printer(self._tokenizer, is_quiet=self._options.json or self._screen.holds_terminal)
        try:
            with DRAIN.busy(generation.cancel, drain_s=self._config.supervision.drain_s):
                for event in generation.events():
                    match event:
                        case TokenGenerated():
                            if not answer.generated_tokens:
                                self._screen.refresh()
                            answer.generated_tokens += 1
                            answer.total_s = event.elapsed_s
                            text = "" if event.token in request.stop_tokens else printer.token(event.token)
                            answer.text += text
                            engine.show_text(text)
                        case PromptProgress():
                            pass
                        case GenerationFinished():
                            answer.reason = event.reason
                            answer.text += printer.finish()
                            raise_if_failed(event, engine)
        except KeyboardInterrupt:
            generation.cancel()
            printer.finish()  # what is said next begins a line
            raise
        self._screen.hide()
        if self._screen.holds_terminal and not self._options.json:
            _print_answer(answer.text)
        if self._options.json:
            if generation.figures is None:
                if DRAIN.is_requested:
                    self._screen.note("told to end before the prompt was read: no report")
                    raise Terminated
                message = "the request has no figures"
                raise engine.failure or InvariantError(message)
            print_json(self._report(engine, plan, prompt, answer, generation.figures))
        if DRAIN.is_requested:
            raise Terminated

    def _sampling(self) -> SamplingSettings:
        decode = self._config.decode
        return SamplingSettings(
            temperature=decode.temperature,
            top_p=decode.top_p,
            top_k=decode.top_k,
            min_p=decode.min_p,
            seed=decode.seed,
        )

    def _report(
        self,
        engine: Engine,
        plan: PromptPlan,
        prompt: tuple[int, ...],
        answer: Answer,
        figures: RequestFigures,
    ) -> dict[str, object]:
        layers = range(self._plan.num_layers)
        once = needed_bytes_once(
            upload=plan.upload,
            first_layers=[stage.first_layer for stage in self._plan.stages],
            resident=[stage.resident_experts for stage in self._plan.stages],
            routed=figures.routed,
            blob_bytes={layer: self._model.expert_blob_bytes(layer) for layer in layers},
        )
        result = RequestResult(
            text=answer.text,
            prompt_tokens=len(prompt),
            generated_tokens=answer.generated_tokens,
            finish_reason=answer.reason,
            ttft_s=figures.ttft_s,
            total_s=answer.total_s,
            expert_bytes_moved=figures.expert_bytes_moved,
            expert_bytes_once=once,
        )
        stages = [
            StageResult(
                stage=stage.stage,
                pid=stage.pid,
                device=stage.device,
                numa_node=stage.numa_node,
                binding=stage.binding,
                route=stage.route,
                first_layer=stage.first_layer,
                last_layer=stage.last_layer,
                clock=figures.clocks[stage.stage],
                counters=figures.counters[stage.stage],
            )
            for stage in engine.stages()
        ]
        return launch_report(result, plan, stages)

    def _chat_template(self) -> str | None:
        template = self._model.metadata.get("tokenizer.chat_template")
        return template if isinstance(template, str) else None

    # --- the tokenizer -----------------------------------------------------------------------------------

    def _load_tokenizer(self) -> "Tokenizer | None":
        from strata_coord.coordinator.tokenizer import Tokenizer, has_vocabulary

        if not has_vocabulary(self._model.metadata):
            return None
        return Tokenizer.from_metadata(self._model.metadata)

    def _need_tokenizer(self) -> "Tokenizer":
        if self._tokenizer is None:
            message = f"{self._model.path}: the model has no vocabulary; only --prompt-ids works"
            raise ConfigError(message)
        return self._tokenizer


class _Printer:
    """Writes the answer to stdout as it comes, or keeps quiet for --json. Control characters are escaped."""

    def __init__(self, tokenizer: "Tokenizer | None", *, is_quiet: bool) -> None:
        from strata_coord.coordinator.tokenizer import StreamDecoder

        self._decoder = StreamDecoder(tokenizer) if tokenizer is not None else None
        self._is_quiet = is_quiet
        self._has_written = False

    def token(self, token: int) -> str:
        """The text that a token completes; printed unless quiet. Without a vocabulary, the id."""
        text = self._decoder.feed(token) if self._decoder is not None else f"{token} "
        return self._write(text)

    def finish(self) -> str:
        """What is left of a split character, and the end of the line."""
        text = self._decoder.finish() if self._decoder is not None else ""
        if self._has_written or text:
            self._write(text + "\n")
        return text

    def _write(self, text: str) -> str:
        self._has_written = True
        if not self._is_quiet:
            _print_answer(text, end="")
        return text


def _print_answer(text: str, *, end: str = "\n") -> None:
    """Write to stdout; what a model says may not control the terminal."""
    from strata_coord.coordinator.terminal_text import escape_control

    with named_stdout():
        sys.stdout.write((escape_control(text, keep="\n\t") if sys.stdout.isatty() else text) + end)
        sys.stdout.flush()


def _not_empty(name: str, text: str) -> str:
    if not text.strip():
        message = f"{name}: the prompt is empty"
        raise ConfigError(message)
    return text


def _read_file(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(MAX_PROMPT_BYTES + 1)
    except OSError as error:
        message = f"{path}: cannot be read: {error.strerror}"
        raise ConfigError(message) from None
