"""Writes the table of logits errors: architecture x weight type x {whole, chunked, 2 stages, 3 stages}.

    PYTHONPATH=.types:tests python -m oracle.logits_table > table.md

Tiny random models of four layers; the oracle is transformers with the file's dequantised values. A type fills
every matrix whose rows are whole blocks of it; other matrices keep the recipe's types. Tokens whose router or
block gap in the oracle is below 1e-4 are drawn again before anything is compared. About ten minutes.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import gguf
import torch
from oracle.clear_ids import find_clear_ids
from oracle.export import ARCHITECTURES, ExportOptions, export_gguf
from oracle.reference import reference
from oracle.tiny import TinyOptions, tiny_model
from stage_chain import StageChain, relative_error

from strata_coord.coordinator.ggml_types import WEIGHT_TYPES

Type = gguf.GGMLQuantizationType
NUM_LAYERS = 4
NUM_TOKENS = 64
ENDS_OF_TEXT = (17, 18, 40)
CHUNKS = [1, 2, 1, 23, 36, 1]
KINDS = ("embedding", "output", "attention", "mixer", "hyper", "shared", "experts_gate_up", "experts_down")


def errors(architecture: str, weight_type: Type | None, folder: Path) -> tuple[list[float], bool]:
    """Relative errors of the four ways, and whether every best token agrees."""
    model = tiny_model(architecture, TinyOptions(num_layers=NUM_LAYERS))
    path = folder / "model.gguf"
    options = ExportOptions()
    if weight_type is not None:
        options = ExportOptions(recipe="quantised", types=dict.fromkeys(KINDS, weight_type))
    export_gguf(model, path, options)
    ids = find_clear_ids(model, num_tokens=NUM_TOKENS, ends_of_text=ENDS_OF_TEXT)
    oracle = reference(model, ids)
    found, agrees = [], True
    for boundaries, cuts in (((), [NUM_TOKENS]), ((), CHUNKS), ((2,), [NUM_TOKENS]), ((1, 3), CHUNKS)):
        with StageChain(path, boundaries=boundaries) as chain:
            logits = chain.prompt_logits(ids.tolist(), folder, cuts)
        found.append(relative_error(logits, oracle.logits))
        agrees &= bool(torch.equal(logits.argmax(1), oracle.logits.argmax(1)))
    return found, agrees


def main() -> None:
    """Print the table; progress goes to stderr."""
    torch.set_num_threads(1)
    known = sorted(WEIGHT_TYPES & set(Type.__members__) - {"F32", "NVFP4"})  # NVFP4 comes with scales
    print("| architecture | weights | whole | chunked | 2 stages | 3 stages, chunked | best tokens |")
    print("|---|---|---|---|---|---|---|")
    worst = 0.0
    for architecture in sys.argv[1:] or sorted(ARCHITECTURES.values()):
        for name in ("F32", *known):
            with tempfile.TemporaryDirectory() as folder:
                weight_type = None if name == "F32" else Type[name]
                found, agrees = errors(architecture, weight_type, Path(folder))
            worst = max(worst, *found)
            cells = " | ".join(f"{error:.1e}" for error in found)
            print(f"| `{architecture}` | {name} | {cells} | {'equal' if agrees else 'differ'} |", flush=True)
            print(f"{architecture} {name}: {cells}", file=sys.stderr)
    print(f"\nWorst: {worst:.1e}.")


if __name__ == "__main__":
    main()
