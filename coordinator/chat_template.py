"""Messages to prompt text by the model's own chat template, rendered in a child process with limits.

A template that is refused (too large, broken, too slow, too big a result) is replaced by the built-in ChatML
template with a notice; a template that rejects the messages themselves fails the request.
"""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from strata_coord.coordinator.bounded_child import run_bounded
from strata_coord.coordinator.printable import printable
from strata_coord.ipc.errors import ModelError, RequestError

if TYPE_CHECKING:
    from strata_coord.coordinator.control_guard import ControlGuard

TEMPLATE_KEY = "tokenizer.chat_template"
MAX_TEMPLATE_BYTES = 256 << 10
MAX_OUTPUT_CHARS = 4 << 20
MAX_REQUEST_BYTES = 64 << 20
WALL_SECONDS = 3.0
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
RESERVED_NAMES = frozenset(
    {"messages", "add_generation_prompt", "raise_exception", "strftime_now", "tojson", "range", "namespace"}
    | {"dict", "lipsum", "cycler", "joiner", "self", "loop", "caller"}
)
# What the child's interpreter needs to find itself; a template has no business with the rest.
_KEPT_ENVIRONMENT = (
    "PATH",
    "PYTHONPATH",
    "PYTHONHOME",
    "LD_LIBRARY_PATH",
    "VIRTUAL_ENV",
    "LANG",
    "LC_ALL",
    "TZ",
)
_MAX_ANSWER_BYTES = 6 * MAX_OUTPUT_CHARS + 16_384  # JSON spells a control character with six bytes
_COMMAND = (sys.executable, "-P", "-m", "strata_coord.coordinator.template_child")

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """A rendered conversation, for Tokenizer.encode with allow_special."""

    text: str
    mark: str | None = None  # breaks control tokens that the messages spell; not a part of the text
    notice: str | None = None  # why, in one line, the model's own template was not used


def chat_prompt(
    template: str | None,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = True,
    extra: Mapping[str, Any] | None = None,
    token_names: Mapping[str, str] | None = None,
    guard: "ControlGuard | None" = None,
) -> ChatPrompt:
    """Render messages with the model's template, or with the built-in one where there is none that works.

    Args:
        template: the model's own, None if the file has none.
        messages: each with role and content, as strings.
        add_generation_prompt: end with the opening of the assistant's turn.
        extra: more names for the template, from the user (tools, enable_thinking).
        token_names: the template's names for special tokens (bos_token, eos_token).
        guard: the tokenizer's, for prompts from users; keeps control tokens in messages and extra from
            becoming any.

    Raises:
        RequestError: the template rejects these messages, or extra holds a reserved name.
    """
    mark = None
    if guard is not None:
        (messages, extra), mark = guard.guard([list(messages), dict(extra or {})], [template, token_names])
    extra = {**(extra or {}), **(token_names or {})}
    if template is None:
        notice = "the model has no chat template; using the built-in ChatML template"
    else:
        try:
            text = render_chat(template, messages, add_generation_prompt=add_generation_prompt, extra=extra)
            return ChatPrompt(text=text, mark=mark)
        except ModelError as error:
            notice = f"{error}; using the built-in ChatML template"
    try:
        text = render_chat(CHATML, messages, add_generation_prompt=add_generation_prompt, extra=extra)
    except ModelError as error:
        # The template is our own, so it must be the messages that it cannot take.
        raise RequestError(str(error)) from None
    return ChatPrompt(text=text, mark=mark, notice=notice)


def render_chat(
    template: str,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = True,
    extra: Mapping[str, Any] | None = None,
) -> str:
    """Render a template in a child process; ends within WALL_SECONDS and a little.

    Raises:
        ModelError: the template is refused: it is too large, broken, or exceeds a limit.
        RequestError: the template rejects the messages, or they cannot be passed to it.
    """
    size = len(template.encode(errors="replace"))
    if size > MAX_TEMPLATE_BYTES:
        _refuse(f"{size} bytes, the limit is {MAX_TEMPLATE_BYTES}")
    names = dict(extra or {})
    reserved = sorted(RESERVED_NAMES & names.keys())
    if reserved:
        message = f"chat template: the name {reserved[0]} is reserved"
        raise RequestError(message)
    request = _encode(
        {
            "template": template,
            "messages": list(messages),
            "add_generation_prompt": add_generation_prompt,
            "extra": names,
            "output_limit": MAX_OUTPUT_CHARS,
        }
    )
    environment = {name: os.environ[name] for name in _KEPT_ENVIRONMENT if name in os.environ}
    child = run_bounded(
        _COMMAND, request, environment=environment, seconds=WALL_SECONDS, max_answer_bytes=_MAX_ANSWER_BYTES
    )
    if child.problem is not None:
        _refuse(child.problem)
    return _text_of(child.answer)


def _encode(request: Mapping[str, object]) -> bytes:
    try:
        data = json.dumps(request, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        message = f"chat template: the messages cannot be written as JSON: {printable(str(error))}"
        raise RequestError(message) from None
    if len(data) > MAX_REQUEST_BYTES:
        message = f"chat template: the messages have {len(data)} bytes, the limit is {MAX_REQUEST_BYTES}"
        raise RequestError(message)
    return data


def _text_of(answer: bytes) -> str:
    """Return the text of a child's answer, or raise what it says instead. The child is not trusted."""
    try:
        value = json.loads(answer)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict) or len(value) != 1:
        _refuse("the rendering process gave no answer")
    ((kind, text),) = value.items()
    if not isinstance(text, str) or len(text) > MAX_OUTPUT_CHARS:
        _refuse("the rendering process gave no text")
    if kind == "rejected":
        message = f"the model's chat template rejects the messages: {printable(text)}"
        raise RequestError(message)
    if kind != "text":
        _refuse(printable(text))
    return text


def _refuse(problem: str) -> NoReturn:
    message = f"{TEMPLATE_KEY}: {problem}"
    raise ModelError(message)
