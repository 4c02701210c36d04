"""What the command line of launch asks for, checked for contradictions. Pure; reads no file.

The configuration says what the machine and the model are; these options say what to do with them once.
None always means "not given": the configuration decides.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

PrefillMode = Literal["auto", "layer-major", "chunk-major"]
LogFormat = Literal["text", "json"]

DEFAULT_MAX_TOKENS = 256  # an answer that fits a screen, also where the model never ends by itself


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """The options of one `strata-coord launch`."""

    config: Path
    prompt: str | None = None
    prompt_file: Path | None = None
    read_stdin: bool = False  # the prompt is all of standard input
    prompt_ids: Path | None = None  # a JSON list of token ids, taken as they are
    max_tokens: int = DEFAULT_MAX_TOKENS
    mode: PrefillMode | None = None
    model: str | None = None  # a path, or a name such as builtin:split24
    overrides: tuple[str, ...] = ()  # key=value, as given to --set
    json: bool = False
    dashboard: bool = True
    trace: Path | None = None  # a Chrome trace is written here
    logits: Path | None = None  # float32 .npy [tokens, vocabulary] is written here
    raw: bool = False  # the prompt goes to the model without the chat template
    plan_file: Path | None = None  # a saved plan, replayed
    log_format: LogFormat | None = None
    debug: bool = False

    @property
    def has_prompt(self) -> bool:
        """Whether the launch answers one prompt and ends, instead of reading prompts from the terminal."""
        return bool(self.prompt_sources)

    @property
    def prompt_sources(self) -> tuple[str, ...]:
        """The option names that give a prompt; more than one contradict each other."""
        given = {
            "--prompt": self.prompt is not None,
            "--prompt-file": self.prompt_file is not None,
            "-": self.read_stdin,
            "--prompt-ids": self.prompt_ids is not None,
        }
        return tuple(name for name, is_given in given.items() if is_given)


def contradiction(options: LaunchOptions) -> str | None:
    """Return one line about options that cannot go together or would be ignored, or None.

    An option that is given and then not used is worse than an error: the user believes that it acted.
    """
    sources = options.prompt_sources
    if len(sources) > 1:
        return f"{' and '.join(sources)} both give a prompt: keep one"
    if not sources:
        for name, is_given in (("--json", options.json), ("--logits", options.logits is not None)):
            if is_given:
                return f"{name} needs a prompt: add --prompt, --prompt-file, --prompt-ids or -"
    if options.raw and options.prompt_ids is not None:
        return "--raw has no effect with --prompt-ids: token ids never pass the chat template"
    for text in options.overrides:
        key, equals, _ = text.partition("=")
        if not equals or not key.strip():
            return f"--set {text}: expected key=value, for example --set prefill.mode=layer-major"
    return None
