"""Checks between keys, and the keys whose feature this version does not have. Pure.

Both work on the raw tables, guarded by type, so that they report beside the schema's errors and not only once
those are mended.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from strata_coord.coordinator.config_errors import KeyPath, Problem

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["GRID_TOKENS", "cross_checks", "unavailable_keys"]

# Super-chunks and sub-chunks are cut on multiples of this many tokens: the block of the chunked DeltaNet
# form.
GRID_TOKENS = 64

_LATER = "is not available in this version"
# Key -> values that ask for nothing new; any other value is refused.
_UNAVAILABLE: dict[tuple[str, str], tuple[object, ...]] = {
    ("model", "compute_dtype"): ("auto", "fp32", "bf16"),
    ("split", "prompt_tokens"): (),
    ("split", "decode_weight"): (),
    ("prefill", "rows"): ("auto", "vram"),
    ("memory", "pin"): (False,),
    ("memory", "direct_io"): (False,),
    ("memory", "expert_profile"): (),
    ("memory", "snapshot_gib"): (0, 0.0),
    ("memory", "mirrors"): ([],),
    ("decode", "draft"): ("off", "none"),
    ("serve", "host"): (),
    ("serve", "port"): (),
    ("serve", "api_key_file"): (),
    ("supervision", "restarts_per_10_min"): (0,),
    ("hosts", "keys_file"): (),
}
_UNAVAILABLE_OF_A_STAGE = ("node", "link_limit_gb_per_s")


def unavailable_keys(tables: Mapping[str, Any]) -> list[Problem]:
    """Return a problem for each key that asks for a feature which this version lacks."""
    problems = []
    for (table, key), allowed in _UNAVAILABLE.items():
        value = _get(tables, table, key)
        if value is None or any(value == one and type(value) is type(one) for one in allowed):
            continue
        use = (
            f"; use {' or '.join(_toml(one) for one in allowed)}, or leave it out"
            if allowed
            else "; leave it out"
        )
        problems.append(Problem(path=(table, key), text=f"{_toml(value)} {_LATER}{use}"))
    if _get(tables, "split", "boundaries") == "auto":
        text = f'"auto" {_LATER}; name the first layer of each later stage, for example [24]'
        problems.append(Problem(path=("split", "boundaries"), text=text))
    for number, stage in enumerate(_stages(tables)):
        for key in _UNAVAILABLE_OF_A_STAGE:
            if key in stage:
                text = f"{_toml(stage[key])} {_LATER}; leave it out"
                problems.append(Problem(path=("stage", number, key), text=text))
    return problems


def cross_checks(tables: Mapping[str, Any]) -> list[Problem]:
    """Return a problem for each pair of keys that contradict each other."""
    return [*_split_checks(tables), *_prefill_checks(tables), *_kv_checks(tables)]


def _split_checks(tables: Mapping[str, Any]) -> list[Problem]:
    boundaries = _get(tables, "split", "boundaries")
    if boundaries is None:
        boundaries = []
    if not isinstance(boundaries, list) or not all(type(one) is int for one in boundaries):
        return []
    path: KeyPath = ("split", "boundaries")
    problems = []
    if any(second <= first for first, second in itertools.pairwise(boundaries)):
        problems.append(Problem(path=path, text=f"expected rising layers, got {boundaries}"))
    num_stages = len(_stages(tables)) if "stage" in tables else 1
    if num_stages != len(boundaries) + 1:
        made = len(boundaries) + 1
        text = f"{len(boundaries)} boundaries make {made} stages, but the file has {num_stages} [[stage]]"
        problems.append(Problem(path=path, text=text))
    return problems


def _prefill_checks(tables: Mapping[str, Any]) -> list[Problem]:
    problems = []
    values = {}
    for key in ("super_chunk_tokens", "sub_chunk_tokens", "reserved_tokens", "slot_rows"):
        value = _get(tables, "prefill", key)
        if type(value) is not int or value < 1:
            continue
        values[key] = value
        if value % GRID_TOKENS:
            near = max(GRID_TOKENS, round(value / GRID_TOKENS) * GRID_TOKENS)
            text = f"expected a multiple of {GRID_TOKENS}, got {value}; the nearest is {near}"
            problems.append(Problem(path=("prefill", key), text=text))
    sub = values.get("sub_chunk_tokens")
    if sub is None:
        return problems
    for key in ("super_chunk_tokens", "reserved_tokens"):
        if values.get(key, sub) < sub:
            text = f"{values[key]} is below sub_chunk_tokens = {sub}"
            problems.append(Problem(path=("prefill", key), text=text))
    slot = values.get("slot_rows")
    if slot is not None and slot % sub:
        text = f"expected a multiple of sub_chunk_tokens = {sub}, got {slot}"
        problems.append(Problem(path=("prefill", "slot_rows"), text=text))
    return problems


def _kv_checks(tables: Mapping[str, Any]) -> list[Problem]:
    pool = _get(tables, "kv", "pool_tokens")
    context = _get(tables, "model", "context_tokens")
    if type(pool) is int and type(context) is int and pool < context:
        text = f"{pool} cannot hold one sequence of model.context_tokens = {context}"
        return [Problem(path=("kv", "pool_tokens"), text=text)]
    return []


def _get(tables: Mapping[str, Any], table: str, key: str) -> Any:
    found = tables.get(table)
    return found.get(key) if isinstance(found, dict) else None


def _stages(tables: Mapping[str, Any]) -> list[dict[str, Any]]:
    stages = tables.get("stage")
    if not isinstance(stages, list):
        return []
    return [stage if isinstance(stage, dict) else {} for stage in stages]


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f'"{value}"' if isinstance(value, str) else str(value)
