#!/usr/bin/env python3
"""The page and the plot of what was measured beside other software in one run:

    bench/report_side_by_side.py              write bench/results/peers/README.md, and the table of
                                              the first screen into README.md
    bench/report_side_by_side.py --plot FILE  draw the ratios of whole layers as SVG (matplotlib)

bench/results/peers/side_by_side.json has layers and grouped GEMMs of all libraries on one GPU on
one day, checkpoint_quantizers.json what bench/peers/checkpoint_quantizers.py writes. The folder of
the GPU has what bench/peers/moe.py and moe_gemm.py write with --bench.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import report_moe
from report_moe import table

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "bench" / "results" / "peers"
REPEATED = "h200"
# Cases of a later document replace those of an earlier one.
REPEATED_DOCUMENTS = ("moe_peers_humming", "moe_peers_humming_w4a8", "moe_peers_deep_gemm")
KINDS = ("plain", "sustained")  # A burst, and long enough to lower the clock.
REPEATED_METHOD = (
    "`bench/peers/moe.py --bench` measured these layers: narrowfloat and the peer in turn, on the "
    "same uniformly random experts, CUDA graphs of up to 32 ranges of tokens; in a burst of 0.03 s "
    "after a rest of 0.3 s, and for 0.3 s, which lowers the clock. Ids and weights are given. The peer's "
    "slots are sorted before the clock starts, narrowfloat sorts them in the layer. A few tokens "
    "of every case were checked in the same run: the peer's against fp32 on rows that are not "
    "quantized (errors of 4e-2 with FP8 rows, 5e-3 with bf16), narrowfloat's against its fp64 reference. "
    "`mxfp4_fp8` has an activation scale for every 128 columns in both libraries, "
    "`mxfp4_fp8_token` one a row, which Humming is made for.")
BEGIN = "<!-- bench/report_side_by_side.py: headline begin -->"
END = "<!-- bench/report_side_by_side.py: headline end -->"
HEADLINE_TOKENS = (1, 16, 64, 256, 1024, 4096)


def us(value: float) -> str:
    """Microseconds as they were written down, of three or four digits."""
    return f"{value:g}"


def document(name: str) -> dict:
    return json.loads((FOLDER / f"{name}.json").read_text())


def pairs(layer: dict) -> list[tuple[float, float]]:
    """Times of the fastest peer and of narrowfloat, for each number of tokens."""
    fastest = (min(times) for times in zip(*layer["peers_us"].values(), strict=True))
    return list(zip(fastest, layer["narrowfloat_us"], strict=True))


def ratios(layer: dict) -> list[float]:
    return [peer / ours for peer, ours in pairs(layer)]


def layer_table(layer: dict) -> str:
    columns = [layer["tokens"]]
    heads = ["tokens"]
    if layer["floor_us"]:
        heads.append("floor")
        columns.append([us(value) for value in layer["floor_us"]])
    for name, times in {**layer["peers_us"], "narrowfloat": layer["narrowfloat_us"]}.items():
        heads.append(name)
        columns.append([us(value) for value in times])
    if layer["peers_us"]:
        heads.append("ratio")
        columns.append([f"{ratio:.2f}" for ratio in ratios(layer)])
    rows = [[str(value) for value in row] for row in zip(*columns, strict=True)]
    about = f"`{layer['mode']}` of `{layer['shape']}`. {layer['about']}".strip()
    return f"### {layer['title']}\n\n{about}\n\n{table(heads, rows)}\n"


def gemm_table(gemms: list[dict]) -> str:
    def rate(gemm: dict) -> str:
        return f"{2 * gemm['n'] * gemm['k'] * gemm['rows'] / gemm['deepgemm_us'] / 1e6:.0f}"
    rows = [[f"{g['n']}, {g['k']}, {g['groups']}", str(g["rows"]), us(g["deepgemm_us"]), rate(g),
             us(g["narrowfloat_us"]), f"{g['deepgemm_us'] / g['narrowfloat_us']:.2f}"]
            for g in gemms]
    heads = ["n, k, groups", "rows", "DeepGEMM", "its TFLOP/s", "narrowfloat", "ratio"]
    return f"## Grouped GEMMs, FP8 1x128 by 128x128, bursts\n\n{table(heads, rows)}\n"


def beside_cells(theirs: dict, ours: dict) -> list[str]:
    """Both times and their ratio, in a burst and sustained."""
    cells = []
    for kind in KINDS:
        times = [report_moe.peer_us(case, kind) for case in (theirs, ours)]
        cells += [*map(report_moe.us, times), report_moe.ratio(*times)]
    return cells


def beside_heads(peer: str) -> list[str]:
    return [head for kind in ("", ", sustained")
            for head in (f"{peer}{kind}", f"narrowfloat{kind}", f"ratio{kind}")]


def repeated_tables(results: report_moe.MoeResults) -> str:
    """Peers that bench/peers measured with narrowfloat beside them."""
    layers: dict[tuple, list] = {}
    for (shape, mode, tokens, peer), case in results.peers.items():
        ours = results.beside.get((shape, mode, tokens))
        if ours:
            layers.setdefault((shape, mode, peer), []).append((tokens, case, ours))
    text = ""
    for (shape, mode, peer), cases in sorted(layers.items()):
        rows = [[str(tokens), *beside_cells(theirs, ours)]
                for tokens, theirs, ours in sorted(cases, key=lambda case: case[0])]
        text += (f"### {shape}, `{mode}`\n\n"
                 f"{table(['tokens', *beside_heads(peer.capitalize())], rows)}\n")
    rows = [[f"{n}, {k}, {groups}", str(count),
             *beside_cells(case, results.peer_gemms[mode, n, k, groups, count, "narrowfloat"])]
            for (mode, n, k, groups, count, peer), case in sorted(results.peer_gemms.items())
            if peer != "narrowfloat"]
    heads = ["n, k, groups", "rows", *beside_heads("DeepGEMM")]
    return text + (f"### Grouped GEMMs, FP8 1x128 by 128x128\n\n{table(heads, rows)}\n"
                   if rows else "")


def what_of(document: dict) -> str:
    """The numbers of tokens and the modes of a document's layers, or that it has grouped GEMMs."""
    cases = [case for layer in document.get("layers", ()) for case in layer["cases"]]
    if not cases:
        return "grouped GEMMs"
    tokens = ", ".join(map(str, sorted({case["tokens"] for case in cases})))
    modes = ", ".join(f"`{mode}`" for mode in sorted({case["mode"] for case in cases}))
    return f"{tokens} tokens; {modes}"


def repeated() -> str:
    folder = ROOT / "bench" / "results" / REPEATED
    files = [folder / f"{name}.json" for name in REPEATED_DOCUMENTS]
    documents = [json.loads(file.read_text()) for file in files if file.exists()]
    facts = {name: one[name] for one in documents
             for name in ("torch", "triton", "humming", "deep_gemm") if name in one}
    versions = ", ".join(f"{name} {version}" for name, version in facts.items())
    results = report_moe.MoeResults(documents)
    commits = "; ".join(f"{one['commit']} ({what_of(one)})" for one in documents)
    return (f"## On one {documents[0]['machine']['name']}, as anyone can repeat it\n\n"
            f"{REPEATED_METHOD} A table shows the last of these commits that has a case.\n\n"
            f"narrowfloat at commit {commits}; {versions}. Microseconds.\n\n{repeated_tables(results)}")


def times_less(found: dict) -> float:
    """CPU time of llm-compressor over that of narrowfloat."""
    programs = found["programs"]
    return programs["llm-compressor"]["cpu_seconds"] / programs["narrowfloat"]["cpu_seconds"]


def checkpoint_table(found: dict) -> str:
    programs = found["programs"]
    rows = [[name, f"{run['cpu_seconds']:.1f}", f"{run['wall_seconds']:.1f}",
             f"{run['resident_bytes'] / 1e6:.0f} MB"] for name, run in programs.items()]
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    note = found["machine"]["note"]
    machine = f"{found['machine']['name']}, {found['machine']['threads']} threads"
    return (f"## Quantizing a checkpoint to NVFP4\n\n{found['date']}, {machine}"
            f"{note and f' ({note})'}; {versions}; narrowfloat {found['commit']}. "
            f"{found['source_bytes'] / 1e9:.2f} GB of bf16 weights, median of "
            f"{len(found['import']['runs'])} runs in turns. Starting Python and importing "
            f"llm-compressor takes {found['import']['cpu_seconds']:.1f} s of its CPU time. "
            "Resident memory counts pages of files that are mapped.\n\n"
            f"{table(['program', 'CPU seconds', 'seconds', 'resident'], rows)}\n"
            f"narrowfloat takes {times_less(found):.0f} times less CPU time.\n")


def page() -> str:
    layers = document("side_by_side")
    machine = layers["machine"]
    versions = "; ".join(f"{name}: {version}" for name, version in layers["versions"].items())
    text = ("# Beside other software\n\n"
            "`bench/report_side_by_side.py` writes this page from the JSON documents beside it.\n\n"
            f"## Whole MoE layers\n\n{machine['name']}, driver {machine['driver']}, CUDA "
            f"{machine['cuda_runtime']}, {layers['date']}. {layers['method']} A ratio is the "
            "fastest peer over narrowfloat: above 1 narrowfloat is faster.\n\n"
            f"{versions}.\n\n")
    text += "".join(layer_table(layer) for layer in layers["layers"])
    return (text + gemm_table(layers["gemms"]) + repeated()
            + checkpoint_table(document("checkpoint_quantizers")))


def headline() -> str:
    """The table and the sentence that the README shows between its marks."""
    rows = []
    for layer in (one for one in document("side_by_side")["layers"] if one["peers_us"]):
        times = dict(zip(layer["tokens"], pairs(layer), strict=True))
        rows.append([layer["title"],
                     *(" / ".join(us(value) for value in times[t]) for t in HEADLINE_TOKENS)])
    found = document("checkpoint_quantizers")
    version = found["versions"]["llmcompressor"]
    return (f"{table(['tokens', *map(str, HEADLINE_TOKENS)], rows)}\n"
            f"`narrowfloat quantize` makes an NVFP4 checkpoint with {times_less(found):.0f} times "
            f"less CPU time than\nllm-compressor {version}'s model-free quantization "
            f"([measured](bench/results/peers/README.md#quantizing-a-checkpoint-to-nvfp4)\non "
            f"{found['date']} with [a script](bench/peers/checkpoint_quantizers.py)).")


def write_headline() -> None:
    page = ROOT / "README.md"
    text = page.read_text()
    head, tail = text.split(BEGIN)[0], text.split(END)[1]
    page.write_text(f"{head}{BEGIN}\n\n{headline()}\n\n{END}{tail}")


def draw(path: Path) -> None:
    import matplotlib  # Only the plot needs it.
    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "narrowfloat", "svg.fonttype": "none"})
    from matplotlib import pyplot
    from report_plots import save
    layers = document("side_by_side")
    figure, axes = pyplot.subplots(figsize=(7, 3.2))
    for layer in layers["layers"]:
        if layer["peers_us"]:
            axes.plot(layer["tokens"], ratios(layer), marker="o", label=layer["title"])
    axes.axhline(1, color="black", linewidth=1)
    axes.set(xlabel="tokens", ylabel="fastest peer / narrowfloat",
             title=f"Whole MoE layers beside peers, {layers['machine']['name']}, {layers['date']}")
    axes.set_xscale("log", base=2)
    tokens = layers["layers"][0]["tokens"]
    axes.set_xticks(tokens, tokens)
    axes.set_ylim(0.7, 1.5)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", type=Path, help="draw this SVG file")
    arguments = parser.parse_args()
    if arguments.plot:
        draw(arguments.plot)
    else:
        (FOLDER / "README.md").write_text(page())
        write_headline()


if __name__ == "__main__":
    main()
