"""Session fixtures: tiny models of each architecture as GGUF, with the model that is their oracle."""

from __future__ import annotations

import functools
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from oracle.clear_ids import stored_ids
from oracle.export import ExportOptions, export_gguf
from oracle.reference import Reference, reference
from oracle.tiny import tiny_model

if TYPE_CHECKING:
    import torch
    from torch import nn

# name: (architecture, recipe)
TINY_FIXTURES = {
    "tiny_qwen3moe_f32": ("qwen3moe", "f32"),
    "tiny_qwen3moe_q": ("qwen3moe", "quantised"),
    "tiny_qwen4exp_f32": ("qwen4exp", "f32"),
    "tiny_qwen4exp_q": ("qwen4exp", "quantised"),
}


@dataclass(frozen=True)
class TinyCase:
    """A GGUF file, the transformers model with exactly its weights, and a prompt without near ties."""

    path: Path
    model: nn.Module
    ids: torch.Tensor  # int64 [200]

    @functools.cached_property
    def reference(self) -> Reference:
        """Logits and margins of the prompt, computed once."""
        return reference(self.model, self.ids)


def build_tiny(name: str, folder: Path | None) -> nn.Module:
    """Write the file of a fixture as folder/name.gguf (to nowhere if None) and return its model."""
    architecture, recipe = TINY_FIXTURES[name]
    model = tiny_model(architecture)
    with tempfile.TemporaryDirectory() as scratch:
        export_gguf(model, (folder or Path(scratch)) / f"{name}.gguf", ExportOptions(recipe=recipe))
    return model


def _case(name: str, factory: pytest.TempPathFactory) -> TinyCase:
    folder = factory.mktemp("tiny")
    model = build_tiny(name, folder)
    return TinyCase(path=folder / f"{name}.gguf", model=model, ids=stored_ids(name))


@pytest.fixture(scope="session")
def tiny_qwen3moe_f32(tmp_path_factory: pytest.TempPathFactory) -> TinyCase:
    return _case("tiny_qwen3moe_f32", tmp_path_factory)


@pytest.fixture(scope="session")
def tiny_qwen3moe_q(tmp_path_factory: pytest.TempPathFactory) -> TinyCase:
    return _case("tiny_qwen3moe_q", tmp_path_factory)


@pytest.fixture(scope="session")
def tiny_qwen4exp_f32(tmp_path_factory: pytest.TempPathFactory) -> TinyCase:
    return _case("tiny_qwen4exp_f32", tmp_path_factory)


@pytest.fixture(scope="session")
def tiny_qwen4exp_q(tmp_path_factory: pytest.TempPathFactory) -> TinyCase:
    return _case("tiny_qwen4exp_q", tmp_path_factory)
