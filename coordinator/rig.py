"""The facts of a machine as plain data, to and from the text of a rig file. Pure: probe.py fills them in.

Every rate says where it comes from, so that a plan made from a guess does not look like one made from a
measurement.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from strata_coord.ipc.errors import ConfigError

__all__ = [
    "ASSUMED_RATES",
    "DeviceFacts",
    "Limits",
    "NodeFacts",
    "Rate",
    "Rates",
    "Rig",
    "rig_from_toml",
    "rig_to_toml",
]

RateSource = Literal["measured", "assumed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """One rate per second and its source."""

    value: float
    source: RateSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What the cost model divides by."""

    copy_bytes_per_s: Rate  # arena to the device's window; on the CPU one thread's memcpy
    drive_bytes_per_s: Rate  # model file to host memory
    expand_bytes_per_s: Rate  # quantised blocks to fp32, bytes written, one thread
    flops_per_s: Rate  # fp32 matrix products, one thread
    attention_flops_per_s: Rate  # fp32 attention under a mask, one thread
    call_s: Rate  # seconds, not per second: fixed cost of one sub-chunk in one layer


# One thread of a small x86 host, rounded, from a stage of the packaged model: 512 rows took 0.8 s, 4,096 took
# 8 s, and 512 rows behind 4,096 others took 1.8 s, on two cores that other work kept busy.
ASSUMED_RATES = Rates(
    copy_bytes_per_s=Rate(value=6e9, source="assumed"),
    drive_bytes_per_s=Rate(value=1e9, source="assumed"),
    expand_bytes_per_s=Rate(value=1.5e9, source="assumed"),
    flops_per_s=Rate(value=3e10, source="assumed"),
    attention_flops_per_s=Rate(value=1.4e10, source="assumed"),
    call_s=Rate(value=1e-3, source="assumed"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """One NUMA node."""

    node: int
    cpus: tuple[int, ...]  # that this program may use
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """One GPU that this program may use."""

    device: int  # CUDA ordinal among the visible ones, in the order of their bus ids
    name: str
    uuid: str  # "GPU-..."
    bus_id: str  # as sysfs spells it, 0000:3b:00.0
    total_bytes: int
    free_bytes: int
    compute_capability: tuple[int, int]
    link_generation: int  # of PCIe at this moment; an idle card lowers it. 0: not told
    link_width: int
    max_link_generation: int  # that card and slot can reach together
    max_link_width: int
    numa_node: int  # -1: not known
    peers: tuple[int, ...] = ()  # devices that the driver says this one can write to
    link_bytes_per_s: Rate | None = None  # from pinned host memory; None: to be assumed from the link

    @property
    def key(self) -> str:
        """The device's name in configurations and plans."""
        return f"cuda:{self.device}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the container or the system grants; None: no limit."""

    memory_bytes: int | None
    memlock_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rig:
    """One machine."""

    name: str
    nodes: tuple[NodeFacts, ...]  # at least one; node -1: the machine tells nothing about nodes
    available_bytes: int  # host memory that may still be taken, limits counted in
    limits: Limits
    rates: Rates
    devices: tuple[DeviceFacts, ...] = ()
    no_devices: str = ""  # why there is no GPU to use, in words

    @property
    def num_cpus(self) -> int:
        """CPUs that this program may use."""
        return sum(len(node.cpus) for node in self.nodes)


_DEVICE_NUMBERS = (
    "total_bytes",
    "free_bytes",
    "link_generation",
    "link_width",
    "max_link_generation",
    "max_link_width",
    "numa_node",
)


def rig_to_toml(rig: Rig) -> str:
    """Return the text of a rig file; rig_from_toml reads it back unchanged."""
    lines = [f"name = {_quoted(rig.name)}", f"available_bytes = {rig.available_bytes}"]
    if rig.no_devices:
        lines.append(f"no_devices = {_quoted(rig.no_devices)}")
    lines += ["", "[limits]"]
    for key in ("memory_bytes", "memlock_bytes"):
        value = getattr(rig.limits, key)
        if value is not None:
            lines.append(f"{key} = {value}")
    for node in rig.nodes:
        cpus = ", ".join(map(str, node.cpus))
        lines += [
            "",
            "[[node]]",
            f"node = {node.node}",
            f"cpus = [{cpus}]",
            f"memory_bytes = {node.memory_bytes}",
        ]
    for device in rig.devices:
        lines += ["", *_device_lines(device)]
    lines += ["", "[rates]"]
    for key in Rates.__dataclass_fields__:
        lines.append(f"{key} = {_rate_text(getattr(rig.rates, key))}")
    return "\n".join(lines) + "\n"


def _device_lines(device: DeviceFacts) -> list[str]:
    major, minor = device.compute_capability
    lines = ["[[device]]", f"device = {device.device}"]
    lines += [f"{key} = {_quoted(getattr(device, key))}" for key in ("name", "uuid", "bus_id")]
    lines += [f"{key} = {getattr(device, key)}" for key in _DEVICE_NUMBERS]
    lines += [f"compute_capability = [{major}, {minor}]", f"peers = {list(device.peers)}"]
    if device.link_bytes_per_s is not None:
        lines.append(f"link_bytes_per_s = {_rate_text(device.link_bytes_per_s)}")
    return lines


def _rate_text(rate: Rate) -> str:
    return f"{{ value = {rate.value!r}, source = {_quoted(rate.source)} }}"


def rig_from_toml(text: str, *, name: str) -> Rig:
    """Read the text of a rig file.

    Args:
        text: The file's text.
        name: The file's name, for errors.

    Raises:
        ConfigError: Not TOML, or a key is missing, unknown or of the wrong type.
    """
    try:
        reader = _Reader(name=name, table=tomllib.loads(text), path="")
    except tomllib.TOMLDecodeError as error:
        message = f"{name}: not valid TOML: {error}"
        raise ConfigError(message) from error
    limits = reader.table_of("limits", required=False)
    rates = reader.table_of("rates", required=False)
    rig = Rig(
        name=reader.text("name"),
        available_bytes=reader.whole("available_bytes", least=1),
        limits=Limits(
            memory_bytes=limits.optional_whole("memory_bytes"),
            memlock_bytes=limits.optional_whole("memlock_bytes"),
        ),
        nodes=tuple(
            NodeFacts(
                node=node.whole("node", least=-1),
                cpus=node.wholes("cpus"),
                memory_bytes=node.whole("memory_bytes", least=1),
            )
            for node in reader.tables_of("node")
        ),
        rates=Rates(
            **{key: rates.rate(key) or getattr(ASSUMED_RATES, key) for key in Rates.__dataclass_fields__}
        ),
        devices=tuple(_device(device) for device in reader.tables_of("device", required=False)),
        no_devices=reader.text("no_devices", default=""),
    )
    reader.finish()
    if not rig.nodes or not rig.num_cpus:
        message = f"{name}: node: at least one [[node]] with one CPU is needed, got {rig.num_cpus} CPUs"
        raise ConfigError(message)
    return rig


def _device(table: _Reader) -> DeviceFacts:
    numbers = {key: table.whole(key, least=-1 if key == "numa_node" else 0) for key in _DEVICE_NUMBERS}
    capability = table.wholes("compute_capability")
    if len(capability) != 2:
        table.refuse("compute_capability", "two numbers, such as [9, 0]", list(capability))
    return DeviceFacts(
        device=table.whole("device"),
        name=table.text("name"),
        uuid=table.text("uuid"),
        bus_id=table.text("bus_id", default=""),
        compute_capability=(capability[0], capability[1]),
        peers=table.wholes("peers", default=()),
        link_bytes_per_s=table.rate("link_bytes_per_s"),
        **numbers,
    )


class _Reader:
    """One table of a rig file; remembers which keys were asked for, so that unknown ones are found."""

    def __init__(self, *, name: str, table: dict[str, Any], path: str) -> None:
        self._name = name
        self._table = table
        self._path = path
        self._asked: set[str] = set()
        self._children: list[_Reader] = []

    def text(self, key: str, *, default: str | None = None) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            self.refuse(key, "a text", value)
        return value

    def whole(self, key: str, *, least: int = 0) -> int:
        value = self._value(key)
        if type(value) is not int or value < least:
            self.refuse(key, f"a whole number of at least {least}", value)
        return value

    def optional_whole(self, key: str) -> int | None:
        self._asked.add(key)
        return self.whole(key) if key in self._table else None

    def wholes(self, key: str, *, default: tuple[int, ...] | None = None) -> tuple[int, ...]:
        value = self._value(key, None if default is None else list(default))
        if not isinstance(value, list) or not all(type(one) is int and one >= 0 for one in value):
            self.refuse(key, "an array of whole numbers", value)
        return tuple(value)

    def rate(self, key: str) -> Rate | None:
        self._asked.add(key)
        if key not in self._table:
            return None
        table = self.table_of(key)
        value, source = table._value("value"), table._value("source")
        if type(value) not in (int, float) or not 0 < value < float("inf"):
            table.refuse("value", "a number above 0", value)
        if source not in ("measured", "assumed"):
            table.refuse("source", '"measured" or "assumed"', source)
        return Rate(value=float(value), source=source)

    def table_of(self, key: str, *, required: bool = True) -> _Reader:
        value = self._value(key) if required or key in self._table else {}
        if not isinstance(value, dict):
            self.refuse(key, "a table", value)
        return self._child(key, value)

    def tables_of(self, key: str, *, required: bool = True) -> list[_Reader]:
        value = self._value(key, None if required else [])
        if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
            self.refuse(key, "tables", value)
        return [self._child(f"{key}.{number}", one) for number, one in enumerate(value)]

    def finish(self) -> None:
        for key in self._table:
            if key not in self._asked:
                self.refuse(key, "no such key", self._table[key])
        for child in self._children:
            child.finish()

    def _child(self, key: str, table: dict[str, Any]) -> _Reader:
        child = _Reader(name=self._name, table=table, path=f"{self._path}{key}.")
        self._children.append(child)
        return child

    def _value(self, key: str, default: Any = None) -> Any:
        self._asked.add(key)
        if key not in self._table:
            if default is not None:
                return default
            message = f"{self._name}: {self._path}{key}: missing"
            raise ConfigError(message)
        return self._table[key]

    def refuse(self, key: str, expected: str, found: object) -> NoReturn:
        message = f"{self._name}: {self._path}{key}: expected {expected}, got {found!r}"
        raise ConfigError(message)


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in escaped) + '"'
