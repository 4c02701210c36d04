"""The configuration as frozen pydantic models, keys and units of the configuration contract.

Owns the schema and load_config. Unknown keys are errors; every error of a file is reported at once, one per
line (config_errors.py finds the lines), together with the checks between keys and the keys whose feature this
version does not have (config_checks.py). Reads no hardware: whether a plan fits is the planner's business.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from strata_coord.coordinator.config_checks import cross_checks, unavailable_keys
from strata_coord.coordinator.config_errors import Problem, Source, problems_from_pydantic
from strata_coord.ipc.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Config", "PrefillConfig", "StageConfig", "config_schema_text", "load_config", "parse_config"]

Positive = Annotated[int, Field(ge=1)]
NotNegative = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class ModelConfig(_Table):
    """The model to run."""

    path: str = Field(
        min_length=1,
        description='A GGUF file, its first shard (relative to this file), or "builtin:split24".',
    )
    context_tokens: Positive | Literal["auto"] = Field(
        default="auto",
        description='Longest sequence, prompt and answer together; "auto": the model\'s, at most 32768.',
    )
    compute_dtype: Literal["auto", "fp32", "fp16", "bf16"] = Field(
        default="auto", description="Type of the matrix products; auto: bf16 on a GPU, fp32 on the CPU."
    )


class SplitConfig(_Table):
    """Which layers go to which stage."""

    boundaries: tuple[Positive, ...] | Literal["auto"] = Field(
        default=(), description='First layer of every stage but the first, rising; or "auto".'
    )
    prompt_tokens: Positive | None = Field(
        default=None, description="Prompt length that an automatic split is made for."
    )
    decode_weight: Annotated[float, Field(ge=0, le=1)] | None = Field(
        default=None, description="Weight of decode time in an automatic split."
    )


class StageConfig(_Table):
    """One stage: one worker process on one device."""

    device: str = Field(
        default="auto",
        pattern=r"^(auto|cpu|cuda:\d+|cuda:GPU-[0-9a-fA-F-]+)$",
        description='"cpu", "cuda:0", "cuda:GPU-<uuid>", or "auto": stage i on GPU i, in turn.',
    )
    numa_node: NotNegative | Literal["auto", "off"] = Field(
        default="auto", description="NUMA node that the worker is bound to; auto: its GPU's."
    )
    vram_budget_mib: Positive | None = Field(
        default=None, description="Device memory this stage may use; on the CPU, bytes in its place."
    )
    vram_reserve_mib: NotNegative | None = Field(default=None, description="Device memory left to others.")
    arena_gib: Annotated[float, Field(ge=0)] | None = Field(
        default=None, description="Host memory for this stage's experts, in place of its share."
    )
    cpu_threads: Positive | Literal["auto"] = Field(default="auto", description="Threads of the arithmetic.")
    node: str | None = Field(default=None, description="Host that runs the stage.")
    link_limit_gb_per_s: PositiveFloat | None = Field(
        default=None, description="Throttle of expert uploads, for experiments; GB are powers of ten."
    )


class PrefillConfig(_Table):
    """How prompts are read."""

    mode: Literal["auto", "layer-major", "chunk-major"] = Field(
        default="auto", description="Order of the walk; auto takes the order predicted to be fastest."
    )
    super_chunk_tokens: Positive | Literal["auto"] = Field(
        default="auto", description="Cap on the rows that walk together, a multiple of 64."
    )
    sub_chunk_tokens: Positive | Literal["auto"] = Field(
        default="auto", description="Rows of one dense kernel call, a multiple of 64."
    )
    reserved_tokens: Positive | Literal["auto"] = Field(
        default="auto", description="Rows that have permanent room, taken before the expert cache gets any."
    )
    slot_rows: Positive | Literal["auto"] = Field(
        default="auto", description="Rows of one hand-off slot, a multiple of sub_chunk_tokens."
    )
    hand_off_slots: Annotated[int, Field(ge=1, le=64)] | Literal["auto"] = Field(
        default="auto", description="Slots between two neighbouring stages."
    )
    upload: Literal["auto", "stream-all", "routed-only"] = Field(
        default="auto",
        description="Which non-resident experts are uploaded; auto decides by expected distinct experts.",
    )
    rows: Literal["auto", "vram", "host"] = Field(default="auto", description="Where residual rows live.")


class MemoryConfig(_Table):
    """Memory tiers of the experts."""

    arena_gib: Annotated[float, Field(ge=0)] | Literal["auto"] = Field(
        default="auto",
        description="Host memory for experts, all stages together; what does not fit is read from the file.",
    )
    pin: bool | None = Field(default=None, description="Pin the arena for the device's copy engine.")
    direct_io: bool | None = Field(default=None, description="Read the file past the page cache.")
    expert_profile: str | None = Field(
        default=None, description="Ranking of experts by use, which decides residency."
    )
    vram_margin_mib: NotNegative | None = Field(
        default=None, description="Device memory of each stage kept spare."
    )
    window_mib: Positive | Literal["auto"] = Field(
        default="auto", description="Ring that streamed experts are uploaded into."
    )
    snapshot_gib: Annotated[float, Field(ge=0)] | None = Field(
        default=None, description="Host memory for state snapshots."
    )
    mirrors: tuple[str, ...] = Field(default=(), description="The same model files on other drives.")


class KvConfig(_Table):
    """Keys and values of attention."""

    dtype: Literal["fp16", "bf16", "fp32", "int8"] = Field(
        default="fp16",
        description="Type that keys and values are kept in; int8 has a scale per token and head.",
    )
    pool_tokens: Positive | Literal["auto"] = Field(
        default="auto", description='Tokens of all sequences together; "auto": context_tokens.'
    )
    max_sequences: Annotated[int, Field(ge=1, le=1024)] = Field(
        default=4, description="Sequences that may exist at a time."
    )


class DecodeConfig(_Table):
    """Default sampling, which a request may override."""

    temperature: Annotated[float, Field(ge=0, le=100)] = Field(default=0.0, description="0 is greedy.")
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(default=1.0, description="Nucleus kept; 1 keeps all.")
    top_k: NotNegative = Field(default=0, description="Tokens kept; 0 keeps all.")
    min_p: Annotated[float, Field(ge=0, le=1)] = Field(
        default=0.0, description="Least probability relative to the best."
    )
    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(
        default=0, description="A draw depends on seed and position only."
    )
    draft: str | None = Field(default=None, description="Drafting of tokens ahead.")


class ServeConfig(_Table):
    """The HTTP API."""

    host: str | None = Field(default=None, description="Address to listen on.")
    port: Annotated[int, Field(ge=1, le=65535)] | None = Field(default=None, description="Port to listen on.")
    api_key_file: str | None = Field(default=None, description="File with one key a line.")


class SupervisionConfig(_Table):
    """What happens when a stage fails or hangs."""

    restarts_per_10_min: NotNegative = Field(
        default=0, description="Restarts of a failed stage before the launch gives up."
    )
    drain_s: Annotated[float, Field(ge=0)] = Field(
        default=10.0, description="Time that running requests get at shutdown."
    )
    hang_s: PositiveFloat = Field(
        default=60.0, description="Time without progress after which a stage counts as stuck."
    )


class HostsConfig(_Table):
    """Stages on other hosts."""

    keys_file: str | None = Field(default=None, description="Keys of the coordinators.")


class LogConfig(_Table):
    """Logging."""

    level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Least severity that is logged."
    )
    file: str | None = Field(default=None, description="Log file; none: standard error.")
    format: Literal["text", "json"] = Field(default="text", description="Form of a log line.")


class Config(_Table):
    """A launch of strata-coord."""

    model: ModelConfig
    split: SplitConfig = SplitConfig()
    stage: tuple[StageConfig, ...] = Field(default=(StageConfig(),), min_length=1, max_length=64)
    prefill: PrefillConfig = PrefillConfig()
    memory: MemoryConfig = MemoryConfig()
    kv: KvConfig = KvConfig()
    decode: DecodeConfig = DecodeConfig()
    serve: ServeConfig = ServeConfig()
    supervision: SupervisionConfig = SupervisionConfig()
    hosts: HostsConfig = HostsConfig()
    log: LogConfig = LogConfig()


def load_config(path: str | Path, overrides: Sequence[str] = (), *, model: str | None = None) -> Config:
    """Read and check a configuration file.

    Args:
        path: The TOML file; paths inside it are relative to its folder.
        overrides: "table.key=value" or "stage.1.key=value"; a value is TOML, a bare word is a string.
        model: Replaces model.path; relative to the working directory.

    Raises:
        ConfigError: One line for each error found.
    """
    path = Path(path)
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        message = f"{path}: not UTF-8 text, byte {error.start}"
        raise ConfigError(message) from error
    except OSError as error:
        message = f"{path}: cannot be read: {error.strerror or error}"
        raise ConfigError(message) from error
    if model is not None and not model.startswith("builtin:"):
        model = str(Path(model).absolute())
    return parse_config(text, name=str(path), folder=path.absolute().parent, overrides=overrides, model=model)


def parse_config(
    text: str,
    *,
    name: str,
    folder: Path,
    overrides: Sequence[str] = (),
    model: str | None = None,
) -> Config:
    """Check the text of a configuration file; load_config without the reading.

    Raises:
        ConfigError: One line for each error found.
    """
    try:
        tables: dict[str, Any] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        message = f"{name}: not valid TOML: {error}"
        raise ConfigError(message) from error
    source = Source(name=name, text=text)
    problems: list[Problem] = []
    for override in overrides:
        problems += source.apply_override(tables, override)
    if model is not None and isinstance(tables.setdefault("model", {}), dict):
        tables["model"]["path"] = model
        source.overridden[("model", "path")] = "--model"
    config = None
    try:
        config = Config.model_validate(_tuples(tables))
    except ValidationError as error:
        problems += problems_from_pydantic(error, Config)
    problems += unavailable_keys(tables)
    problems += cross_checks(tables)
    if problems or config is None:
        raise ConfigError("\n".join(source.lines(problems)))
    return _absolute_paths(config, folder)


def config_schema_text() -> str:
    """Return the JSON schema that editors use, as shipped beside the configurations."""
    schema = Config.model_json_schema()
    schema["$schema"] = "http://json-schema.org/draft-07/schema#"
    schema["title"] = "strata-coord configuration"
    return json.dumps(schema, indent=2, sort_keys=True) + "\n"


def _tuples(value: object) -> object:
    """Turn lists into tuples, which is what strict validation wants for fields that must not change."""
    if isinstance(value, dict):
        return {key: _tuples(item) for key, item in value.items()}
    if isinstance(value, list):
        return tuple(_tuples(item) for item in value)
    return value


def _absolute_paths(config: Config, folder: Path) -> Config:
    changes: dict[str, object] = {}
    if not config.model.path.startswith("builtin:"):
        path = str(folder / Path(config.model.path).expanduser())
        changes["model"] = config.model.model_copy(update={"path": path})
    if config.log.file is not None:
        file = str(folder / Path(config.log.file).expanduser())
        changes["log"] = config.log.model_copy(update={"file": file})
    return config.model_copy(update=changes) if changes else config
