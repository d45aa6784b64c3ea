"""MoeLayer: every mode against the golden layers of an independent model; checkpoints; errors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from moe_cases import Case, File, swizzled

import narrowfloat as nf

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "models" / "tiny-moe"
MODES = tuple(nf.moe_modes())
RNG = np.random.default_rng(11)


def relative(got: np.ndarray, wanted: np.ndarray) -> float:
    """Frobenius distance."""
    a, b = got.astype(np.float64), wanted.astype(np.float64)
    size = np.linalg.norm(b)
    return float(np.linalg.norm(a - b) / size) if size else float(np.linalg.norm(a))


@pytest.mark.parametrize("mode", MODES)
def test_golden_layers(mode: str) -> None:
    """Ids and maps exactly, outputs as close as fp64 sums bring them."""
    file = File(mode)
    for number in range(len(file.cases)):
        case = Case(file, number)
        tokens = case.plan["tokens"]
        config = case.config(accumulation="float64")
        layer = nf.MoeLayer.prepare(config=config, **swizzled(case, case.weights()))
        slots = config.top_k + config.shared_experts
        ids = np.empty((tokens, slots), np.int32)
        rows = np.empty(tokens * slots, np.int32)
        weights = np.empty((tokens, slots), np.float32)
        wanted = case.get("out")
        out = np.zeros(wanted.shape, wanted.dtype)
        given = case.inputs()
        assert layer.run(**given, out=out, topk_ids=ids, slot_to_row=rows,
                         expert_weights=weights) is out  # fmt: skip
        assert ids.reshape(-1).tolist() == case.expect["topk_ids"]
        assert rows.tolist() == case.expect["slot_to_row"]
        model_weights, tolerance = case.get("expert_weights")
        assert (np.abs(weights - model_weights) <= tolerance).all()
        assert relative(out, wanted) < 4e-3, (mode, number)


def plain_layer(experts: int = 4, hidden: int = 128, inter: int = 128) -> tuple:
    """Random bfloat16 weights, tokens and logits."""
    w1 = (RNG.standard_normal((experts, 2 * inter, hidden)) / 8).astype(ml_dtypes.bfloat16)
    w2 = (RNG.standard_normal((experts, hidden, inter)) / 8).astype(ml_dtypes.bfloat16)
    x = RNG.standard_normal((9, hidden)).astype(ml_dtypes.bfloat16)
    logits = RNG.standard_normal((9, experts)).astype(np.float32)
    return w1, w2, x, logits


FORMATS = {"fp8_tensor": "fp8_tensor", "fp8_block": "fp8_128x128", "mxfp8": "mxfp8",
           "mxfp4_mxfp8": "mxfp4", "mxfp4_bf16": "mxfp4", "mxfp4_fp8": "mxfp4", "nvfp4": "nvfp4",
           "nvfp4_per_token": "nvfp4", "nvfp4_bf16": "nvfp4", "nvfp4_fp8_exact": "nvfp4",
           "nvfp4_fp8_rounded": "nvfp4", "mxfp4_fp8_token": "mxfp4",
           "nvfp4_fp8_token": "nvfp4", "mxfp4_int8": "mxfp4",
           "nvfp4_int8": "nvfp4"}  # fmt: skip


@pytest.mark.parametrize("mode", FORMATS)
def test_quantized_tensors_bring_their_factors(mode: str) -> None:
    """The layer from QuantizedTensors is near the bfloat16 one of the dequantized weights."""
    w1, w2, x, logits = plain_layer()
    q1, q2 = (nf.quantize(w, FORMATS[mode], batched=True) for w in (w1, w2))
    config = {"hidden": 128, "inter": 128, "experts": 4, "top_k": 2, "out_dtype": "float32"}
    plain = nf.MoeLayer.prepare(q1.dequantize("bfloat16"), q2.dequantize("bfloat16"),
                                nf.MoeConfig(**config))  # fmt: skip
    static = {}
    if mode in ("fp8_tensor", "nvfp4"):
        top = 448.0 if mode == "fp8_tensor" else 2688.0
        static = {"input_multiplier": top / 4, "inter_multiplier": np.full(4, top / 16, np.float32)}
    layer = nf.MoeLayer.prepare(q1, q2, nf.MoeConfig(**config, mode=mode), **static)
    far = 0.25 if mode in ("nvfp4", "nvfp4_per_token") else 0.08
    assert relative(layer.run(x, logits), plain.run(x, logits)) < far
    assert layer.weight_bytes < plain.weight_bytes


def test_checkpoint_layer_is_the_trained_one() -> None:
    """Recorded activations of the model go through the layer."""
    reader = nf._core.SafetensorsReader.open(str(TINY / "calibration" / "activations.safetensors"))
    listing = reader.tensors()

    def recorded(part: str) -> np.ndarray:
        name = next(n for n in listing if n.startswith("layers.0.") and part in n)
        dtype, shape = listing[name]
        array = np.empty(shape, {"F32": np.float32, "BF16": np.uint16}[dtype])
        reader.read(name, array)
        return array.view(ml_dtypes.bfloat16) if dtype == "BF16" else array

    assert nf.moe_layers(str(TINY))[0] == 0
    layer = nf.MoeLayer.from_checkpoint(TINY, 0, out_dtype="float32")
    hidden, wanted = recorded("hidden_states"), recorded("output")
    x = hidden.astype(ml_dtypes.bfloat16)
    logits = x.astype(np.float32) @ layer.router_weight.T
    assert layer.router_bias is None and layer.config.experts == layer.router_weight.shape[0]
    plain = layer.run(x, logits)
    assert relative(plain, wanted) < 1e-2
    narrow = nf.MoeLayer.from_checkpoint(TINY, 0, mode="nvfp4_bf16", out_dtype="float32")
    assert 1e-3 < relative(narrow.run(x, logits), plain) < 0.15


def test_shards_add_up() -> None:
    """Expert parallelism: two halves of the experts, the same routing."""
    w1, w2, x, logits = plain_layer()
    base = {"hidden": 128, "inter": 128, "experts": 4, "top_k": 2, "out_dtype": "float32",
            "slot_dtype": "float32"}  # fmt: skip
    whole = nf.MoeLayer.prepare(w1, w2, nf.MoeConfig(**base)).run(x, logits)
    parts = []
    for offset in (0, 2):
        config = nf.MoeConfig(**base, expert_offset=offset, local_experts=2)
        layer = nf.MoeLayer.prepare(w1[offset : offset + 2], w2[offset : offset + 2], config)
        parts.append(layer.run(x, logits))
    assert relative(parts[0] + parts[1], whole) < 1e-6


def test_slots_combine_to_the_output() -> None:
    """slot_out, slot_to_row and expert_weights through combine() are `out` to the bit."""
    w1, w2, x, logits = plain_layer()
    layer = nf.MoeLayer.prepare(w1, w2, nf.MoeConfig(hidden=128, inter=128, experts=4, top_k=2))
    slots = np.zeros((layer.max_rows(9), 128), ml_dtypes.bfloat16)
    rows, weights = np.empty(18, np.int32), np.empty((9, 2), np.float32)
    assert layer.run(x, logits, slot_out=slots, slot_to_row=rows, expert_weights=weights) is None
    got = nf.combine(slots, rows, weights)
    assert got.dtype == ml_dtypes.bfloat16
    workspace = layer.new_workspace(9)
    workspace.fill(0xFF)
    assert got.tobytes() == layer.run(x, logits, workspace=workspace).tobytes()
    again = layer.run(x, ids=nf.route(logits, top_k=2)[0], weights=weights)
    assert got.tobytes() == again.tobytes()


def test_explain_names_every_stage() -> None:
    """The explanation for the layer's own device, and for one that this build may lack."""
    w1, w2, *_ = plain_layer()
    layer = nf.MoeLayer.prepare(w1, w2, nf.MoeConfig(hidden=128, inter=128, experts=4, top_k=2))
    stages = layer.explain(9)
    assert [stage.op for stage in stages][:2] == ["route", "permute"]
    assert all(stage.chosen for stage in stages)
    assert "route" in repr(stages[0])
    if not nf.build_info()["cuda_enabled"]:
        assert not any(stage.chosen for stage in layer.explain(9, "cuda:0"))


def test_references_are_explained_and_stay_on_the_cpu() -> None:
    """Options of a reference change its stages; a GPU refuses each of them by its name."""
    w1, w2, *_ = plain_layer()
    shape = {"hidden": 128, "inter": 128, "experts": 4, "top_k": 2}
    coded = [nf.quantize(weight, "fp8_128x128", batched=True) for weight in (w1, w2)]
    for given, options, quantized in (
        ((w1, w2), {"accumulation": "float64"}, 0),
        ((w1, w2), {"fp32_rows": True}, 0),
        (coded, {"mode": "fp8_block", "double_quantize_fc1": True}, 2),
    ):
        layer = nf.MoeLayer.prepare(*given, nf.MoeConfig(**shape, **options))
        ops = [stage.op for stage in layer.explain(9)]
        assert ops.count("quantize_activations") == quantized
        with pytest.raises(NotImplementedError, match=f"{list(options)[-1]}.*cuda:0"):
            layer.explain(9, "cuda:0")


def test_fast_sums_are_near_to_exact_ones() -> None:
    """They are off by default, and a layer says whether it has them."""
    w1, w2, x, logits = plain_layer()
    weights = [nf.quantize(weight, "nvfp4", batched=True) for weight in (w1, w2)]
    config = nf.MoeConfig(hidden=128, inter=128, experts=4, top_k=2, mode="nvfp4_bf16")
    assert not config.fast_sums
    exact = nf.MoeLayer.prepare(*weights, config)
    fast = nf.MoeLayer.prepare(*weights, replace(config, fast_sums=True))
    assert fast.config.fast_sums and not exact.config.fast_sums
    assert relative(fast.run(x, logits), exact.run(x, logits)) < 3e-3
    if any(stage.chosen in ("cpu_avx512_bf16", "cpu_amx_bf16") for stage in fast.explain(len(x))):
        # Its sums are others, which rounding to bfloat16 would hide.
        config = replace(config, slot_dtype="float32", out_dtype="float32")
        results = [nf.MoeLayer.prepare(*weights, replace(config, fast_sums=is_fast)).run(x, logits)
                   for is_fast in (False, True)]  # fmt: skip
        assert (results[0] != results[1]).any()


def test_threads_share_a_layer() -> None:
    """Concurrent runs with workspaces of their own give the bytes of one."""
    from concurrent.futures import ThreadPoolExecutor

    w1, w2, x, logits = plain_layer()
    layer = nf.MoeLayer.prepare(w1, w2, nf.MoeConfig(hidden=128, inter=128, experts=4, top_k=2))
    wanted = layer.run(x, logits).tobytes()
    with ThreadPoolExecutor(4) as pool:
        results = pool.map(lambda _: layer.run(x, logits).tobytes(), range(40))
        assert all(result == wanted for result in results)


W1, W2, X, LOGITS = plain_layer()
CONFIG = nf.MoeConfig(hidden=128, inter=128, experts=4, top_k=2)
LAYER = nf.MoeLayer.prepare(W1, W2, CONFIG)
Q1 = nf.quantize(W1, "nvfp4", batched=True)

REFUSED = {
    "rank": (lambda: nf.MoeLayer.prepare(W1[0], W2, CONFIG), "w1"),
    "rows": (lambda: nf.MoeLayer.prepare(W1[:, :100], W2, CONFIG), "w1"),
    "dtype": (lambda: nf.MoeLayer.prepare(W1.astype(np.float32), W2, CONFIG),
              "weights.w1.values: expected dtype BF16, got F32"),
    "mode": (lambda: nf.MoeLayer.prepare(W1, W2, nf.MoeConfig(
        hidden=128, inter=128, experts=4, top_k=2, mode="int4")), "int4"),
    "method": (lambda: nf.route(LOGITS, top_k=2, method="best"), "best"),
    "top_k": (lambda: nf.route(LOGITS, top_k=5), "top_k"),
    "no logits": (lambda: nf.route(top_k=2), "logits"),
    "experts": (lambda: nf.route(ids=np.zeros((2, 2), np.int32), top_k=2), "experts"),
    "bias": (lambda: nf.route(LOGITS, top_k=2, bias=np.zeros(4, np.float32)), "bias"),
    "two scales": (lambda: nf.MoeLayer.prepare(Q1, Q1, CONFIG, w1_scales=Q1.scales), "w1_scales"),
    "format of the mode": (lambda: nf.MoeLayer.prepare(Q1, Q1, CONFIG),
                           "w1: mode bf16 multiplies bfloat16 weights, got nvfp4"),
    "plain weights": (lambda: nf.MoeLayer.prepare(Q1, W2, replace(CONFIG, mode="nvfp4_bf16")),
                      "w2: mode nvfp4_bf16 multiplies nvfp4 weights; .* w2_scales, got ndarray"),
    "no routing": (lambda: LAYER.run(X), "^routing: expected logits, packed or ids, got none$"),
    "hidden": (lambda: LAYER.run(X[:, :64], LOGITS), "^hidden: "),
    "rows of logits": (lambda: LAYER.run(X, LOGITS[:3]), "logits"),
    "id": (lambda: LAYER.run(X, ids=np.full((9, 2), 9, np.int32)), "9"),
    "workspace": (lambda: LAYER.run(X, LOGITS, workspace=LAYER.new_workspace(9)[:-1]),
                  "workspace"),
    "errors": (lambda: LAYER.run(X, LOGITS, errors=np.zeros(1, np.int64)), "errors"),
    "ids of permute": (lambda: nf.permute(np.zeros(4, np.int32), local_experts=2), "ids"),
    "tokens of combine": (lambda: nf.combine(X, np.zeros(9, np.int32)), "tokens"),
    "activation": (lambda: nf.MoeLayer.prepare(W1, W2, nf.MoeConfig(
        hidden=128, inter=128, experts=4, top_k=2, activation=nf.Activation("swish"))), "swish"),
    "layer": (lambda: nf.MoeLayer.from_checkpoint(TINY, 99), "99"),
    "device": (lambda: LAYER.explain(3, "tpu"), "device"),
    "shape of explain": (lambda: nf.explain("quantize", ()), "shape"),
    "op": (lambda: nf.explain("divide", (4, 64)), "divide"),
}  # fmt: skip


@pytest.mark.parametrize("case", list(REFUSED))
def test_value_errors(case: str) -> None:
    """Arguments that can never work; the message names them."""
    call, word = REFUSED[case]
    with pytest.raises(ValueError, match=f"(?i){word}"):
        call()


def test_a_layer_is_made_by_its_methods() -> None:
    """The constructor says which."""
    with pytest.raises(TypeError, match="prepare"):
        nf.MoeLayer()
    assert "bf16" in repr(LAYER) and LAYER.token_tile(9) >= 8


def test_tuned_tiles(tmp_path: Path) -> None:
    """A file of measured token tiles, for this machine and this layer; results stay the same."""
    machine = next((line.split(":", 1)[1].strip() for line in
                    Path("/proc/cpuinfo").read_text().splitlines()
                    if line.startswith("model name")), "unknown")  # fmt: skip
    entry = {"machine": machine, "version": nf.version(), "mode": "bf16",
             "activation": "swiglu", "hidden": 128, "inter": 128, "slots": 2, "experts": 4,
             "local_experts": 4, "first_tokens": 1, "last_tokens": 64, "token_tile": 64,
             "rule_tile": 16, "us": 1.0, "rule_us": 2.0}  # fmt: skip
    path = tmp_path / "tuning.json"
    path.write_text(json.dumps({"format": "narrowfloat moe tuning", "format_version": 2,
                                "entries": [entry]}))
    tuned = LAYER.with_tuning(path)
    assert (LAYER.token_tile(9), tuned.token_tile(9)) == (16, 64)
    assert tuned.run(X, LOGITS).tobytes() == LAYER.run(X, LOGITS).tobytes()
    path.write_text("{")
    with pytest.raises(ValueError, match="tuning.json"):
        LAYER.with_tuning(path)
    with pytest.raises(OSError, match="absent"):
        LAYER.with_tuning(tmp_path / "absent")
