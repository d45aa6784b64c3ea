"""The plots of bench/report.py, as SVG and PNG: bandwidth over the number of rows, and times of
peers over those of the library.  The same results give the same files.
"""

from __future__ import annotations

from pathlib import Path

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
