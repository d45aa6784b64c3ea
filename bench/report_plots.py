"""The plots of bench/report.py, as SVG: bandwidth over the number of rows, times of peers
over those of the library, and times of whole MoE layers over the number of tokens.  The same
results give the same files.
"""

from __future__ import annotations

from pathlib import Path

import report_moe
from report_data import COMMON, FORMATS, IDENTITY, Results, best, median, run_of_peers

try:
    import matplotlib
except ImportError as error:
    raise SystemExit(f"report: plots need matplotlib: {error}") from error

matplotlib.use("Agg")
matplotlib.rcParams.update({"svg.hashsalt": "narrowfloat", "svg.fonttype": "none"})
from matplotlib import pyplot as plt  # noqa: E402  After the choice of a backend.


def plot_bandwidth(results: Results, op: str, path: Path) -> None:
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
    if drawn:
        save(figure, path)


def plot_ratios(results: Results, path: Path) -> None:
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
        save(figure, path)


def plot_layer(results: report_moe.MoeResults, layer: dict, peers_of: str, path: Path) -> None:
    """Latency over tokens: ours, the floor of the same run, what peers reached."""
    shape, mode = layer["shape"], layer["mode"]
    cases = {row["tokens"]: results.layer(shape, mode, row["tokens"]) for row in layer["rows"]}
    ours = {t: report_moe.time_us(case) for t, case in cases.items() if report_moe.time_us(case)}
    if not ours:
        return
    figure, axes = plt.subplots(figsize=(7, 4.2))
    floors = {t: report_moe.floor_us(cases[t]) for t in ours}
    axes.plot(sorted(floors), [floors[t] for t in sorted(floors)], color="black", linestyle="--",
              linewidth=1, label="floor: bytes or operations")
    axes.plot(sorted(ours), [ours[t] for t in sorted(ours)], marker="o", label="narrowfloat")
    for index, peer in enumerate(layer["peers"]):
        points = {row["tokens"]: row["peers"][index] for row in layer["rows"]
                  if row["peers"][index] is not None}
        axes.plot(sorted(points), [points[t] for t in sorted(points)], marker="x", linewidth=1,
                  label=f"{peer} ({peers_of})")
    for peer in results.peers_of(shape, mode):
        points = {key[2]: report_moe.peer_us(case) for key, case in results.peers.items()
                  if key[:2] == (shape, mode) and key[3] == peer and report_moe.peer_us(case)}
        axes.plot(sorted(points), [points[t] for t in sorted(points)], marker="+", linewidth=1,
                  label=f"{peer} ({run_of_peers(results.documents)})")
    axes.set(xlabel="tokens", ylabel="microseconds of a layer",
             title=f"{shape} {mode}, {results.machine['name']}")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=8)
    save(figure, path)


def draw_layers(results: report_moe.MoeResults, targets: dict, folder: Path) -> None:
    for layer in targets["layers"] if results.machine else []:
        name = f"moe_{layer['shape']}_{layer['mode']}".replace("-", "_")
        plot_layer(results, layer, targets["peers_of"], folder / f"{name}.svg")


def save(figure, path: Path) -> None:
    figure.tight_layout()
    # No date: the same results give the same file.
    figure.savefig(path, metadata={"Date": None}, dpi=120)
    lines = path.read_text(encoding="utf-8").splitlines()
    path.write_text("".join(line.rstrip() + "\n" for line in lines), encoding="utf-8")
    plt.close(figure)


def draw(results: Results, folder: Path) -> None:
    for op in ("quantize", "dequantize"):
        plot_bandwidth(results, op, folder / f"{op}_bandwidth.svg")
    plot_ratios(results, folder / "peers.svg")
