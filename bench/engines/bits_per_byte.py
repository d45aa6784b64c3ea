#!/usr/bin/env python3
"""Bits per byte of models/tiny-moe in transformers: every convention and mode, theirs beside ours.

    python bench/engines/bits_per_byte.py

Scores the first 2048 bytes of the held-out text in windows of 512, in bfloat16, on the CPU. First
transformers alone loads each quantized checkpoint, then narrowfloat.transformers does. Prints the
table of docs/engines.md.
"""

from __future__ import annotations

import math
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers

import narrowfloat as nf
import narrowfloat.transformers as nftr

TINY = Path(__file__).resolve().parents[2] / "models" / "tiny-moe"
CONVENTIONS = ("nvfp4-ct", "nvfp4-modelopt", "mxfp4-ct", "mxfp8-ct", "fp8-block")
WINDOWS = torch.tensor(list((TINY / "calibration" / "heldout.txt").read_bytes()[:2048]))


def bits_per_byte(path: Path, **options: Any) -> float:
    """The score of a checkpoint as it loads."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, **options)
    windows = WINDOWS.reshape(4, 512)
    with torch.no_grad():
        scores = model.eval()(windows).logits[:, :-1].double().log_softmax(-1)
    return float(-scores.gather(2, windows[:, 1:, None]).mean() / math.log(2))


def attempt(path: Path) -> str:
    """The score, or the name of the error."""
    try:
        return f"{bits_per_byte(path):.4f}"
    except Exception as error:
        return type(error).__name__


def main() -> None:
    """Prints the table."""
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        paths = {name: Path(folder) / name for name in CONVENTIONS}
        for name, path in paths.items():
            nf.quantize_checkpoint(TINY, path, name)
        mixed = Path(folder) / "mixed"
        nf.quantize_checkpoint(TINY, mixed, "nvfp4-ct", rules=[("*self_attn*", "fp8-block")])
        paths["nvfp4-ct, attention fp8-block"] = mixed
        theirs = {"plain, bfloat16": attempt(TINY)}
        theirs |= {name: attempt(path) for name, path in paths.items()}
        nftr.register()
        ours = {name: attempt(path) for name, path in paths.items()}
    print(f"| Checkpoint | transformers {transformers.__version__} | narrowfloat |\n|---|---|---|")
    for name, score in theirs.items():
        print(f"| {name} | {score} | {ours.get(name, '')} |")
    print("\n| Mode, of plain weights | narrowfloat |\n|---|---|")
    for mode in nf.moe_modes():
        if mode not in ("fp8_tensor", "nvfp4"):  # Their activation scales are constants.
            config = nftr.NarrowfloatConfig(mode)
            print(f"| `{mode}` | {bits_per_byte(TINY, quantization_config=config):.4f} |")


if __name__ == "__main__":
    main()
