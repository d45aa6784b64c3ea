"""The table in docs/checkpoints.md of what scale searches and GPTQ gain on models/tiny-moe.

    python bench/engines/calibrated_quality.py --bin build/cpu/src

Needs the programs, and the Python package with torch and transformers for the calibration.
"""

import argparse
import json
import struct
import subprocess
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "models/tiny-moe"
TEXT = TINY / "calibration/heldout.txt"
SCORED_BYTES, CALIBRATED = 32768, slice(200_000, 200_000 + 131_072)
FULL, MOMENTS, GPTQ = ["--scale-search", "full"], ["--activation-moments"], ["--gptq"]
CHOICES = [
    ("nvfp4", []), ("nvfp4", ["--scale-search", "4over6"]), ("nvfp4", FULL),
    ("nvfp4", [*FULL, *MOMENTS]), ("nvfp4", GPTQ), ("nvfp4", ["--scale-search", "4over6", *GPTQ]),
    ("nvfp4", [*FULL, *GPTQ]), ("nvfp4", [*FULL, *MOMENTS, *GPTQ]),
    ("mxfp4", []), ("mxfp4", ["--mx-scale", "even"]), ("mxfp4", FULL), ("mxfp4", [*FULL, *MOMENTS]),
    ("mxfp4", GPTQ), ("mxfp4", [*FULL, *GPTQ]),
    ("mxfp8", []), ("mxfp8", FULL), ("mxfp8", GPTQ),
]  # fmt: skip


def calibrate(statistics: dict[str, slice], folder: Path) -> None:
    """Writes the Hessians of parts of the text."""
    import torch
    from transformers import AutoModelForCausalLM

    import narrowfloat.transformers as nftr

    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    for name, part in statistics.items():
        ids = torch.frombuffer(bytearray(TEXT.read_bytes()[part]), dtype=torch.uint8).long()
        nftr.calibrate(model, ids.reshape(-1, 8, 512), path=folder / name, statistics="hessian")


def tensors(path: Path) -> dict[str, np.ndarray]:
    """The BF16 and F32 tensors of a file, float64."""
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    found = {}
    for name, entry in json.loads(data[8 : 8 + size]).items():
        if entry.get("dtype") not in ("BF16", "F32"):
            continue
        begin, end = (8 + size + offset for offset in entry["data_offsets"])
        if entry["dtype"] == "BF16":
            values = (np.frombuffer(data[begin:end], "<u2").astype("<u4") << 16).view("<f4")
        else:
            values = np.frombuffer(data[begin:end], "<f4")
        found[name] = values.reshape(entry["shape"]).astype(np.float64)
    return found


def weighted_sqnr(weights: dict[str, np.ndarray], decoded: dict[str, np.ndarray],
                  hessians: dict[str, np.ndarray]) -> float:  # fmt: skip
    """Returns the SQNR in dB of what experts' matrices make of the rows of the Hessians."""
    signal = noise = 0.0
    for name, weight in weights.items():
        if ".experts." not in name:
            continue
        module, expert, matrix, _ = name.rsplit(".", 3)
        side = "inter" if matrix == "down_proj" else "input"
        hessian = hessians[f"{module}.{side}.hessian"][int(expert)]
        for values, is_noise in ((weight, False), (weight - decoded[name], True)):
            power = float(np.sum((values @ hessian) * values))
            signal, noise = signal + power * (not is_noise), noise + power * is_noise
    return 10 * np.log10(signal / noise)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bin", type=Path, default=ROOT / "build/cpu/src")
    parser.add_argument("--statistics", type=Path, help="where calibrated files are, or get")
    arguments = parser.parse_args()
    program = arguments.bin / "cli/narrowfloat"

    def output(*words: object) -> str:
        return subprocess.run([*map(str, words)], check=True, capture_output=True, text=True).stdout

    def bits_per_byte(model: Path) -> float:
        lines = output(arguments.bin / "bench_cli/narrowfloat-bench", "eval", model, "--text", TEXT,
                       "--bytes", SCORED_BYTES, "--mode", "bf16", "--csv").splitlines()  # fmt: skip
        return float(dict(zip(lines[0].split(","), lines[-1].split(",")))["bits_per_byte"])

    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.statistics or Path(temporary)
        parts = {"calibrated.safetensors": CALIBRATED, "scored.safetensors": slice(SCORED_BYTES)}
        missing = {name: part for name, part in parts.items() if not (folder / name).exists()}
        if missing:
            calibrate(missing, folder)
        statistics = folder / "calibrated.safetensors"
        weights = tensors(TINY / "model.safetensors")
        hessians = tensors(folder / "scored.safetensors")
        print("| | SQNR dB | weighted SQNR dB | bits per byte |\n|---|---|---|---|")
        print(f"| plain | | | {bits_per_byte(TINY):.4f} |")
        for convention, options in CHOICES:
            words = []
            for word in options:
                words += [word, statistics] if [word] in (MOMENTS, GPTQ) else [word]
            packed, plain = Path(temporary) / "packed", Path(temporary) / "plain"
            report = json.loads(output(program, "quantize", TINY, packed, "--to", convention,
                                       "--json", "--force", *words))  # fmt: skip
            output(program, "dequantize", packed, plain, "--dtype", "bf16", "--force")
            decoded = tensors(plain / "model.safetensors")
            name = ", ".join(["", *(f"`{one}`" for one in " ".join(options).replace(" --", "|--")
                                    .split("|") if one)])  # fmt: skip
            print(f"| `{convention}`{name} | {report['figures']['sqnr_db']:.2f} | "
                  f"{weighted_sqnr(weights, decoded, hessians):.2f} | {bits_per_byte(plain):.4f} |",
                  flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
