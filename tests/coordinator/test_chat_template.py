import time
from pathlib import Path

import pytest

from strata_coord.coordinator.bounded_child import ChildAnswer
from strata_coord.coordinator.chat_template import MAX_TEMPLATE_BYTES, ChatPrompt, chat_prompt, render_chat
from strata_coord.ipc.errors import ModelError, RequestError

USER = [{"role": "user", "content": "hi"}]
# A wide bound for a loaded machine: the child's own limits are 2 s of processor time and 3 s of wall time.
BOUND_S = 6.0


def refusal(template: str) -> str:
    start = time.monotonic()
    with pytest.raises(ModelError) as info:
        render_chat(template, USER)
    assert time.monotonic() - start < BOUND_S
    message = str(info.value)
    assert message.startswith("tokenizer.chat_template: ")
    assert message.isprintable()
    return message


def test_a_model_s_template_is_rendered_as_transformers_would() -> None:
    template = (
        "{%- for message in messages %}\n"
        "    {%- if loop.first and false %}{% break %}{% endif %}\n"
        "    {{- '<|im_start|>' + message.role + '\\n' + message.content | trim + '<|im_end|>\\n' }}\n"
        "{%- endfor %}\n"
        "{%- if tools %}{{ tools | tojson }}{% endif %}\n"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"
    )
    messages = [{"role": "system", "content": " é <b> "}, {"role": "user", "content": "東京"}]
    text = render_chat(template, messages, extra={"tools": [{"name": "é<"}]})
    assert text == (
        "<|im_start|>system\né <b><|im_end|>\n<|im_start|>user\n東京<|im_end|>\n"
        '[{"name": "é<"}]<|im_start|>assistant\n'
    )
    assert not render_chat(template, messages, add_generation_prompt=False).endswith("assistant\n")


def test_the_clock_is_available() -> None:
    before = time.strftime("%Y")
    text = render_chat("{{ strftime_now('%Y') }}", [])
    assert before <= text <= time.strftime("%Y")


def test_without_a_template_the_built_in_one_is_used_and_said() -> None:
    assert chat_prompt(None, USER) == ChatPrompt(
        text="<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
        notice="the model has no chat template; using the built-in ChatML template",
    )


def test_a_refused_template_is_replaced_and_the_reason_said() -> None:
    prompt = chat_prompt("{% if %}", USER)
    assert prompt.text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert prompt.notice is not None
    assert "TemplateSyntaxError in line 1" in prompt.notice
    assert "\n" not in prompt.notice


def test_a_template_that_works_gives_no_notice() -> None:
    assert chat_prompt("{{ messages[0].content }}", USER) == ChatPrompt(text="hi")


def test_messages_that_a_template_rejects_fail_the_request() -> None:
    with pytest.raises(RequestError, match=r"rejects the messages: roles must\\x1b\[2J alternate"):
        chat_prompt("{{ raise_exception('roles must\x1b[2J alternate') }}", USER)


def test_messages_that_no_template_can_take_fail_the_request() -> None:
    with pytest.raises(RequestError, match="TypeError"):
        chat_prompt(None, [{"role": "user", "content": 7}])
    with pytest.raises(RequestError, match="cannot be written as JSON"):
        chat_prompt(None, [{"role": "user", "content": object()}])


@pytest.mark.parametrize("name", ["messages", "raise_exception", "tojson", "self"])
def test_reserved_names_cannot_be_set_by_a_request(name: str) -> None:
    with pytest.raises(RequestError, match=f"the name {name} is reserved"):
        render_chat("x", USER, extra={name: 1})


def test_a_template_over_its_limit_is_refused_unread() -> None:
    message = refusal("x" * (MAX_TEMPLATE_BYTES + 1))
    assert message.endswith(f"{MAX_TEMPLATE_BYTES + 1} bytes, the limit is {MAX_TEMPLATE_BYTES}")


@pytest.mark.parametrize(
    "payload",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('touch CANARY').read() }}",
        "{{ lipsum.__globals__['os'].system('touch CANARY') }}",
        "{{ self.__init__.__globals__.__builtins__.open('CANARY', 'w') }}",
        "{{ (messages | map(attribute='__class__') | list)[0].mro() }}",
        "{{ ['os', 'x'] | map('attr', '__class__') | list | first | attr('__base__') }}",
        "{{ '{0.__class__.__base__.__subclasses__}'.format(1)() }}",
        "{{ messages.append({}) }}",
        "{{ raise_exception.__globals__ }}",
        "{{ raise_exception.__code__ }}",
        "{{ '' | attr('__class__') }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}{{ os }}",
    ],
)
def test_template_injection_gets_nothing_and_touches_nothing(tmp_path: Path, payload: str) -> None:
    canary = tmp_path / "canary"
    try:
        text = render_chat(payload.replace("CANARY", str(canary)), USER)
    except ModelError:
        text = ""  # most are refused; what the sandbox calls undefined renders as nothing
    assert text.strip() == ""
    assert not canary.exists()


BOMBS = {
    "nested ranges": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a long string": "{{ 'a' * 10**9 }}",
    "doubling": "{% set n = namespace(s='a') %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "a huge power": "{{ 9 ** (9 ** 9) }}",
    "padding": "{{ '%1000000000d' % 1 }}{{ 'x' | center(10**9) }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "output": "{% for a in range(9999) %}{{ 'x' * 1000 }}{% endfor %}",
    "deep nesting": "{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}",
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_exhaustion_ends_within_the_limits(bomb: str) -> None:
    refusal(BOMBS[bomb])


def test_the_child_sees_little_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, str]] = []

    def fake(
        command: object, question: bytes, *, environment: dict[str, str], **limits: object
    ) -> ChildAnswer:
        seen.append(environment)
        return ChildAnswer(b'{"text": "hi"}')

    monkeypatch.setenv("STRATA_TEST_SECRET", "hunter2")
    monkeypatch.setattr("strata_coord.coordinator.chat_template.run_bounded", fake)
    assert render_chat("x", USER) == "hi"
    assert "STRATA_TEST_SECRET" not in seen[0]


@pytest.mark.parametrize(
    "answer", [b"", b"[]", b"{}", b'{"text": 1}', b'{"text": "a", "refused": "b"}', b"[" * 10**5]
)
def test_an_answer_that_is_none_is_a_refusal(monkeypatch: pytest.MonkeyPatch, answer: bytes) -> None:
    fake = ChildAnswer(answer)
    monkeypatch.setattr("strata_coord.coordinator.chat_template.run_bounded", lambda *_, **__: fake)
    assert "gave no" in refusal("x")


def test_large_messages_pass_through_both_pipes() -> None:
    content = "é" * 700_000
    assert render_chat("{{ messages[0].content }}", [{"role": "user", "content": content}]) == content
