"""The plots of bench/report.py, as SVG and PNG: bandwidth over the number of rows, times of peers
over those of the library, and times of whole MoE layers over the number of tokens.  The same
results give the same files.
"""

from __future__ import annotations

from pathlib import Path

import report_moe
from report_data import COMMON, FORMATS, IDENTITY, Results, best, median

try:
    import matplotlib
except ImportError as error:
    raise SystemExit(f"report: plots need matplotlib: {error}") from error

matplotlib.use("Agg")
matplotlib.rcParams.update({"svg.hashsalt": "narrowfloat", "svg.fonttype": "none"})
from matplotlib import pyplot as plt  # noqa: E402  After the choice of a backend.


def plot_bandwidth(results: Results, op: str, path: Path) -> bool:
    figure, axes = plt.subplots(figsize=(7, 4.2))
    drawn = False
    for name in FORMATS:
        cases = results.select({**COMMON, "op": op, "format": name, "cols": 7168,
                                "layout": ("linear", "mn_major")})
        points = {case["rows"]: case["gb_per_s"] for case in cases if best(case)}
        if points:
            drawn = True
            axes.plot(sorted(points), [points[m] for m in sorted(points)], marker="o", label=name)
    axes.axhline(results.rates["copy_gb_per_s"], color="black", linestyle="--", linewidth=1,
                 label="device copy")
    axes.set(xscale="log", xlabel="rows (K = 7168)", ylabel="GB/s read and written",
             title=f"{op}, {results.machine['name']}", ylim=(0, None))
    axes.set_xscale("log", base=2)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return save(figure, path) if drawn else close(figure)


def plot_ratios(results: Results, path: Path) -> bool:
    figure, axes = plt.subplots(figsize=(7, 4.2))
    lines: dict[str, dict[int, float]] = {}
    for case in (c for c in results.cases if c["peer"]):
        ours = results.one({key: case[key] for key in (*IDENTITY, "l2") if key != "maps"})
        theirs, mine = median(case, "plain"), median(ours, "plain")
        if theirs and mine:
            name = f"{case['format'] or case['op']}: {case['peer']}"
            lines.setdefault(name, {})[case["rows"] or case["tokens"]] = theirs / mine
    for name, points in sorted(lines.items()):
        axes.plot(sorted(points), [points[m] for m in sorted(points)], marker="o", label=name)
    axes.axhline(1, color="black", linewidth=1)
    axes.set(xlabel="rows or tokens", ylabel="time of the peer / time of narrowfloat",
             title=f"Peers, plain graph edges, {results.machine['name']}")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.grid(alpha=0.3, which="both")
    if lines:
        axes.legend(fontsize=8)
    return save(figure, path) if lines else close(figure)


def plot_layer(results: report_moe.MoeResults, layer: dict, path: Path) -> bool:
    """Latency over tokens: ours, the floor of the same run, what peers reached."""
    figure, axes = plt.subplots(figsize=(7, 4.2))
    shape, mode = layer["shape"], layer["mode"]
    cases = {row["tokens"]: results.layer(shape, mode, row["tokens"]) for row in layer["rows"]}
    ours = {t: report_moe.time_us(case) for t, case in cases.items() if report_moe.time_us(case)}
    if not ours:
        return close(figure)
    floors = {t: report_moe.floor_us(cases[t]) for t in ours}
    axes.plot(sorted(floors), [floors[t] for t in sorted(floors)], color="black", linestyle="--",
              linewidth=1, label="floor: bytes or operations")
    axes.plot(sorted(ours), [ours[t] for t in sorted(ours)], marker="o", label="narrowfloat")
    for index, peer in enumerate(layer["peers"]):
        points = {row["tokens"]: row["peers"][index] for row in layer["rows"]
                  if row["peers"][index] is not None}
        axes.plot(sorted(points), [points[t] for t in sorted(points)], marker="x", linewidth=1,
                  label=f"{peer} (published)")
    for peer in results.peers_of(shape, mode):
        points = {key[2]: report_moe.peer_us(case) for key, case in results.peers.items()
                  if key[:2] == (shape, mode) and key[3] == peer and report_moe.peer_us(case)}
        axes.plot(sorted(points), [points[t] for t in sorted(points)], marker="+", linewidth=1,
                  label=f"{peer} (this run)")
    axes.set(xlabel="tokens", ylabel="microseconds of a layer",
             title=f"{shape} {mode}, {results.machine['name']}")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=8)
    return save(figure, path)


def draw_layers(results: report_moe.MoeResults, targets: dict,
                folder: Path) -> list[tuple[str, str]]:
    """(title, file name) of what was drawn."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    for layer in targets["layers"] if results.machine else []:
        name = f"moe_{layer['shape']}_{layer['mode']}".replace("-", "_")
        if plot_layer(results, layer, folder / name):
            drawn.append((f"Latency over tokens: {layer['title']}", f"{name}.svg"))
    return drawn


def close(figure) -> bool:
    plt.close(figure)
    return False


def save(figure, path: Path) -> bool:
    figure.tight_layout()
    for suffix in (".svg", ".png"):
        # No date: the same results give the same file.
        metadata = {"Date": None} if suffix == ".svg" else None
        figure.savefig(path.with_suffix(suffix), metadata=metadata, dpi=120)
    svg = path.with_suffix(".svg")
    lines = svg.read_text(encoding="utf-8").splitlines()
    svg.write_text("".join(line.rstrip() + "\n" for line in lines), encoding="utf-8")
    plt.close(figure)
    return True


def draw(results: Results, folder: Path) -> list[tuple[str, str]]:
    """(title, file name) of what was drawn."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    for op in ("quantize", "dequantize"):
        if plot_bandwidth(results, op, folder / f"{op}_bandwidth"):
            drawn.append((f"Bandwidth of {op} over the number of rows", f"{op}_bandwidth.svg"))
    if plot_ratios(results, folder / "peers"):
        drawn.append(("Times of peers over those of narrowfloat", "peers.svg"))
    return drawn
