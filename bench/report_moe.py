"""Tables of Mixture-of-Experts layers and of grouped GEMMs for bench/report.py: documents of
`narrowfloat-bench moe bench --json`, `narrowfloat-bench moe gemm --json` and bench/peers/moe.py.
"""

from __future__ import annotations

from collections.abc import Iterable

from report_data import run_of_peers

Case = dict
# The time that `moe gemm --min-time` gets.
LONG_SECONDS = 0.3
STAGES = ("route", "permute", "quantize_input", "first_gemm", "activation", "second_gemm",
          "combine")


def us(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if value < 100 else f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def table(heads: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows]) + "\n"


class MoeResults:
    """The cases of all documents; a later document counts more."""

    def __init__(self, documents: Iterable[dict]):
        self.documents = list(documents)
        self.layers: dict[tuple, Case] = {}
        self.peers: dict[tuple, Case] = {}
        self.beside: dict[tuple, Case] = {}  # narrowfloat's layers in the peers' own run.
        self.peer_gemms: dict[tuple, Case] = {}
        self.gemms: dict[tuple, Case] = {}
        self.long_gemms: dict[tuple, Case] = {}  # For long enough to lower the clock.
        for document in self.documents:
            if document["command"] == "moe bench peers":
                for layer in document["layers"]:
                    for case in layer["cases"]:
                        key = (layer["shape"], case["mode"], case["tokens"], case["peer"])
                        self.peers[key] = case
                    for case in layer.get("narrowfloat", []):
                        self.beside[layer["shape"], case["mode"], case["tokens"]] = case
            for case in document.get("gemms", []):
                key = (case["mode"], case["n"], case["k"], case["groups"], case["rows"])
                self.peer_gemms[*key, case["peer"]] = case
            for case in document.get("cases", []):
                if document["command"] == "moe gemm":
                    key = (case["mode"], case["n"], case["k"], case["groups"], case["rows"])
                    is_long = document.get("min_seconds", 0) >= LONG_SECONDS
                    (self.long_gemms if is_long else self.gemms)[key] = case
                else:
                    key = (document["shape"], routing_name(document["routing"]), case["mode"],
                           case["tokens"])
                    self.layers[key] = case | {"ep": f"{document['rank']}/{document['ranks']}"}

    @property
    def machine(self) -> dict | None:
        return next((d["gpu"] for d in self.documents if d.get("gpu")), None)

    @property
    def rates(self) -> dict:
        return next((d["rates"] for d in self.documents if d.get("rates")), {})

    @property
    def commits(self) -> list[str]:
        return sorted({d.get("commit", "") for d in self.documents} - {""})

    def layer(self, shape: str, mode: str, tokens: int, routing: str = "uniform") -> Case | None:
        return self.layers.get((shape, routing, mode, tokens))

    def peers_of(self, shape: str, mode: str) -> list[str]:
        return sorted({key[3] for key in self.peers if key[:2] == (shape, mode)})


def routing_name(routing: str) -> str:
    return routing if routing in ("uniform", "zipf") else "recorded"


def time_us(case: Case | None) -> float | None:
    return None if case is None or case["correct"] is False else case["median_seconds"] * 1e6


def floor_us(case: Case | None) -> float | None:
    return None if case is None else case["floor_seconds"] * 1e6


def peer_us(case: Case | None, kind: str = "plain") -> float | None:
    """A time of a case of bench/peers: "plain", in a burst, or "sustained"."""
    return case[kind]["median_us"] if case and case["correct"] and case.get(kind) else None


def ratio(theirs: float | None, ours: float | None) -> str:
    return f"{theirs / ours:.2f}" if theirs and ours else "-"


def target_of(row: dict, case: Case | None, memory_gb_per_s: float) -> float:
    """The target where this run's tokens hit as many experts as the target's did: with few tokens
    nearly all of the time is that of reading them."""
    if case is None or case["experts_hit"] >= case["local_experts"] - 0.5:
        return row["target_us"]
    floor = case["weight_bytes"] / memory_gb_per_s / 1e3
    return row["target_us"] * floor / row["floor_us"]


def verdict(case: Case | None, target: float) -> str:
    if case is None:
        return "not measured"
    time = time_us(case)
    if time is None:
        return "WRONG"
    if time <= target:
        return "met"
    return f"+{us(time - target)} (+{100 * (time / target - 1):.1f} %)"


def layer_row(results: MoeResults, layer: dict, row: dict, memory: float) -> list[str]:
    shape, mode, tokens = layer["shape"], layer["mode"], row["tokens"]
    case = results.layer(shape, mode, tokens)
    target = target_of(row, case, memory)
    here = [us(peer_us(results.peers.get((shape, mode, tokens, peer))))
            for peer in results.peers_of(shape, mode)]
    hit = "-" if case is None else f"{case['experts_hit']:.4g}"
    launches = "-" if case is None or case["launches"] is None else str(case["launches"])
    return [str(tokens), hit, us(row["floor_us"]), us(floor_us(case)),
            *(us(value) for value in row["peers"]), *here, us(row["target_us"]), us(target),
            us(time_us(case)), launches, verdict(case, target)]


def layer_tables(results: MoeResults, targets: dict) -> str:
    text = ""
    for layer in targets["layers"]:
        heads = ["tokens", "experts hit", "floor at 3 TB/s", "floor",
                 *(f"{peer} ({targets['peers_of']})" for peer in layer["peers"]),
                 *(f"{peer} ({run_of_peers(results.documents)})"
                   for peer in results.peers_of(layer["shape"], layer["mode"])),
                 "target", "target, so many experts", "narrowfloat", "launches", "result"]
        rows = [layer_row(results, layer, row, targets["memory_gb_per_s"])
                for row in layer["rows"]]
        text += f"#### {layer['title']}\n\n{layer['about']}\n\n{table(heads, rows)}\n"
    return text


def stage_table(results: MoeResults) -> str:
    rows = []
    for (shape, routing, mode, tokens), case in sorted(results.layers.items()):
        if not case.get("stages"):
            continue
        stages = {stage["stage"]: stage for stage in case["stages"]}
        first, second = stages["first_gemm"], stages["second_gemm"]
        rows.append([shape, mode if routing == "uniform" else f"{mode}, {routing}", str(tokens),
                     *(us(stages[name]["median_seconds"] * 1e6) for name in STAGES),
                     us(time_us(case)),
                     *(f"{stage['weight_gb_per_second']:.0f} / "
                       f"{stage['gflop_per_second'] / 1e3:.0f}" for stage in (first, second))])
    heads = ["shape", "mode", "tokens", *STAGES, "layer", "first GEMM GB/s / TFLOP/s",
             "second GEMM GB/s / TFLOP/s"]
    about = ("A stage's time is how much longer a run to its end takes than one to the end of the "
             "stage before; stages that one kernel does together are counted with the first.")
    return f"#### Stages\n\n{about}\n\n{table(heads, rows)}\n" if rows else ""


def cases_of(targets: dict) -> set[tuple]:
    return {(layer["shape"], "uniform", layer["mode"], row["tokens"])
            for layer in targets["layers"] for row in layer["rows"]}


def other_table(results: MoeResults, title: str, with_target: set[tuple]) -> str:
    """Layers without a target."""
    rows = []
    for key, case in sorted(results.layers.items()):
        if key in with_target:
            continue
        shape, routing, mode, tokens = key
        rows.append([shape, mode, routing, str(tokens), f"{case['experts_hit']:.4g}",
                     str(case["largest_load"]), us(floor_us(case)), us(time_us(case)),
                     f"{case['percent_of_floor']:.0f} %",
                     f"{case['weight_gb_per_second']:.0f}",
                     f"{case['gflop_per_second'] / 1e3:.0f}", str(case["launches"] or "-"),
                     "correct" if case["correct"] else "WRONG"])
    heads = ["shape", "mode", "routing", "tokens", "experts hit", "largest load", "floor",
             "narrowfloat", "of the floor's rate", "GB/s of weights", "TFLOP/s", "launches",
             "result"]
    return f"#### {title}\n\n{table(heads, rows)}\n" if rows else ""


def time_if_right(case: Case | None) -> float | None:
    return case["median_us"] if case is not None and case["correct"] else None


def gemm_rate(n: int, k: int, groups: int, rows: int, time: float | None) -> str:
    """TFLOP/s from 32 rows a group on; below, the rate at which FP8 weights are read."""
    if not time:
        return "-"
    if rows >= 32 * groups:
        return f"{2 * rows * n * k / time / 1e6:.0f} TFLOP/s"
    return f"{n * k * groups * (1 + 4 / 128 / 128) / time / 1e6:.2f} TB/s"


def other_gemm_table(results: MoeResults) -> str:
    """Grouped GEMMs of FP8 weights without a target."""
    rows = []
    for key, case in sorted(results.gemms.items()):
        mode, n, k, groups, count = key
        if not mode.startswith("fp8"):
            continue
        time = time_if_right(case)
        rows.append([mode, f"{n}, {k}, {groups}", str(count), "WRONG" if time is None else us(time),
                     gemm_rate(n, k, groups, count, time), str(case["token_tile"]),
                     us(time_if_right(results.long_gemms.get(key)))])
    heads = ["mode", "N, K, groups", "rows", "narrowfloat", "rate", "token tile",
             "narrowfloat, for long"]
    return f"#### Grouped GEMMs of FP8 weights\n\n{table(heads, rows)}\n" if rows else ""


def gemm_table(results: MoeResults, gemm: dict) -> str:
    if not results.gemms:
        return ""
    rows = []
    for row in gemm["rows"]:
        shape = (row["n"], row["k"], row["groups"], row["rows"])
        key = (gemm["mode"], *shape)
        case = results.gemms.get(key)
        time = time_if_right(case)
        rate = [gemm_rate(*shape, t) for t in (row["target_us"], time)]
        result = "not measured" if case is None else "WRONG" if time is None else (
            "met" if time <= row["target_us"] else
            f"+{us(time - row['target_us'])} (+{100 * (time / row['target_us'] - 1):.1f} %)")
        rows.append([f"{row['n']}, {row['k']}, {row['groups']}", str(row["rows"]),
                     us(row["target_us"]), rate[0], us(time), rate[1],
                     "-" if case is None else str(case["token_tile"]), result,
                     us(time_if_right(results.long_gemms.get(key)))])
    heads = ["N, K, groups", "rows", f"{gemm['peer']} (published)", "its rate", "narrowfloat",
             "rate", "token tile", "result", "narrowfloat, for long"]
    return f"#### {gemm['title']}\n\n{gemm['about']}\n\n{table(heads, rows)}\n"


SUSTAINED_HEADS = ["peer, sustained us", "narrowfloat, sustained us", "ratio, sustained"]


def sustained_cells(peer: Case, ours: Case | None) -> list[str]:
    times = [peer_us(case, "sustained") for case in (peer, ours)]
    return [*map(us, times), ratio(*times)]


def peer_table(results: MoeResults) -> str:
    rows = []
    for (shape, mode, tokens, peer), case in sorted(results.peers.items()):
        beside = results.beside.get((shape, mode, tokens))
        ours = peer_us(beside) if beside else time_us(results.layer(shape, mode, tokens))
        theirs = peer_us(case)
        rows.append([shape, mode, str(tokens), peer, us(theirs), us(ours), ratio(theirs, ours),
                     *sustained_cells(case, beside),
                     case["note"] if case["correct"] else f"WRONG: error {case['error']:.1e}"])
    heads = ["shape", "mode", "tokens", "peer", "peer, us", "narrowfloat, us",
             "peer / narrowfloat", *SUSTAINED_HEADS, "note"]
    title = f"#### Peers' layers ({run_of_peers(results.documents)})"
    about = ("Where a row has sustained times, both ran in turn on the same experts. Else the peer "
             "has plain edges, narrowfloat programmatic ones.")
    return f"{title}\n\n{about}\n\n{table(heads, rows)}\n" if rows else ""


def peer_gemm_table(results: MoeResults) -> str:
    rows = []
    for key, case in sorted(results.peer_gemms.items()):
        *size, peer = key
        if peer == "narrowfloat":
            continue
        mode, n, k, groups, count = size
        ours = results.peer_gemms.get((*size, "narrowfloat"))
        rows.append([mode, f"{n}, {k}, {groups}", str(count), peer, us(peer_us(case)),
                     us(peer_us(ours)), ratio(peer_us(case), peer_us(ours)),
                     *sustained_cells(case, ours)])
    heads = ["mode", "N, K, groups", "rows", "peer", "peer, us", "narrowfloat, us",
             "peer / narrowfloat", *SUSTAINED_HEADS]
    return f"#### Peers' grouped GEMMs\n\n{table(heads, rows)}\n" if rows else ""


def summary(results: MoeResults) -> str:
    cases = [*results.layers.items(), *results.gemms.items()]
    wrong = [key for key, case in cases if case["correct"] is False]
    text = f"{len(cases)} cases, {len(cases) - len(wrong)} right.\n\n"
    return text + "".join(f"- WRONG: {' '.join(map(str, key))}\n" for key in wrong[:20]) + (
        "\n" if wrong else "")


def report(results: MoeResults, targets: dict, everything: bool) -> str:
    machine = results.machine
    if machine is None:
        return ""
    commits = ", ".join(results.commits)
    text = (f"### Whole MoE layers\n\n{machine['name']}, driver {machine['driver']}, CUDA "
            f"{machine['cuda_runtime']}{f', commit {commits}' if commits else ''}. Microseconds "
            "of a run, programmatic edges; other tokens on every run of a graph.\n\n")
    text += summary(results)
    if machine["name"] == targets["device"]:
        text += layer_tables(results, targets) + gemm_table(results, targets["gemm"])
        text += other_table(results, "Other shapes and routings", cases_of(targets))
    else:
        text += f"No targets: they are for {targets['device']}.\n\n"
        text += other_table(results, "Layers", set()) + other_gemm_table(results)
    if everything:
        text += stage_table(results)
    return text + peer_table(results) + peer_gemm_table(results)
