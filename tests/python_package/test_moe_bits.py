"""MoeLayer gives the bytes of the C++ library, which the test program golden_layers runs.

Both read the golden layers, each with code of its own; the program's implementations are the plain
ones. So an argument that is lost or changes places between Python and C++, or a mode, a method or a
type that becomes another, shows in a byte. The last tests show that it would.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from moe_cases import DTYPES, NAMES, Case, File, swizzled, weight_format

import narrowfloat as nf

ROOT = Path(__file__).resolve().parents[2]
MODES = tuple(nf.moe_modes())
ACCUMULATIONS = ("float32", "float64")
PINNED = ",".join(f"{op}:cpu_reference" for op in ("route", "permute", "grouped_gemm", "activation",
                                                   "combine"))  # fmt: skip
UNWRITTEN = 0xA5  # Bytes of outputs before a run.
Bytes = dict[str, bytes]


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Bytes]:
    """Results of a mode's golden layers: CASE.ACCUMULATION.OUTPUT -> bytes."""
    folder = os.environ.get("NARROWFLOAT_TEST_BIN")
    if not folder:
        pytest.skip("NARROWFLOAT_TEST_BIN is not set: the folder of the program golden_layers")
    scratch = tmp_path_factory.mktemp("layers")
    known: dict[str, Bytes] = {}

    def results(mode: str) -> Bytes:
        if mode not in known:
            path = scratch / f"{mode}.safetensors"
            subprocess.run([Path(folder) / "golden_layers", mode, path], check=True,
                           env={**os.environ, "NARROWFLOAT_FORCE": PINNED})  # fmt: skip
            reader = nf._core.SafetensorsReader.open(str(path))
            known[mode] = {}
            for name, (dtype, shape) in reader.tensors().items():
                array = np.empty(shape, {**DTYPES, "I16": np.int16}[dtype])
                reader.read(name, array.view(np.uint8))
                known[mode][name] = array.tobytes()
        return known[mode]

    return results


def outputs_of(case: Case, layer: nf.MoeLayer) -> dict[str, np.ndarray]:
    """All that a run can write, full of UNWRITTEN bytes."""
    config = layer.config
    tokens, slots = case.plan["tokens"], config.top_k + config.shared_experts
    types = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
    shapes = {
        "out": (case.get("out").shape, types[config.out_dtype]),
        "slot_out": ((layer.max_rows(tokens), config.hidden), types[config.slot_dtype]),
        "expert_weights": ((tokens, slots), np.float32),
        "slot_to_row": ((tokens * slots,), np.int32),
        "topk_ids": ((tokens, slots), np.int32),
    }
    if not config.shared_experts:
        shapes["routing_replay"] = ((tokens, slots), np.int16)
    arrays = {name: np.empty(*made) for name, made in shapes.items()}
    for array in arrays.values():
        array.reshape(-1).view(np.uint8)[...] = UNWRITTEN
    return arrays


def run(case: Case, config: nf.MoeConfig, weights: dict[str, Any],
        inputs: dict[str, Any]) -> Bytes:  # fmt: skip
    """Name -> bytes of an output."""
    layer = nf.MoeLayer.prepare(config=config, **weights)
    arrays = outputs_of(case, layer)
    layer.run(**inputs, **arrays)
    return {name: array.tobytes() for name, array in arrays.items()}


@pytest.mark.parametrize("accumulation", ACCUMULATIONS)
@pytest.mark.parametrize("mode", MODES)
def test_golden_layers_have_the_bytes_of_cpp(
    mode: str, accumulation: str, wanted: Callable[[str], Bytes]
) -> None:
    """Twelve layers, every output."""
    results, file, count = wanted(mode), File(mode), 0
    assert len(file.cases) == 12
    for number in range(len(file.cases)):
        case = Case(file, number)
        found = run(case, case.config(accumulation=accumulation), swizzled(case, case.weights()),
                    case.inputs())  # fmt: skip
        for name, got in found.items():
            assert got == results[f"{number}.{accumulation}.{name}"], (number, name)
            count += 1
    assert 2 * count == len(results)


def cases() -> list[Case]:
    """Those of all modes."""
    files = [File(mode) for mode in MODES]
    return [Case(file, number) for file in files for number in range(len(file.cases))]


Given = tuple[nf.MoeConfig, dict[str, Any], dict[str, Any]]  # Config, weights, inputs.


def outcome(case: Case, given: Given) -> Bytes | None:
    """Bytes of a run, or None where it is refused."""
    try:
        return run(case, *given)
    except (ValueError, NotImplementedError, TypeError):
        return None


OTHER = {
    "method": tuple(nf.routing_methods()), "gate_order": ("up_gate", "gate_up", "interleaved"),
    "out_dtype": tuple(NAMES.values()), "slot_dtype": ("bfloat16", "float32"),
    "accumulation": ACCUMULATIONS, "mode": MODES,
}  # fmt: skip


def other_values(name: str, value: Any) -> list[Any]:
    """Other values that a field of a configuration could hold."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, nf.Activation):
        return [nf.Activation(kind) for kind in nf.activations() if kind != value.kind]
    if name == "token_tile":
        return [2 * value]
    if name in OTHER:
        return [other for other in OTHER[name] if other != value]
    return [value + 1, value - 1, 2 * value]


def other_array(value: Any) -> Any:
    """Rows (experts, tokens) in reverse; twice a number."""
    return np.flip(value, 0).copy() if isinstance(value, np.ndarray) else 2 * value


def activation_parameters(config: nf.MoeConfig) -> dict[str, Any]:
    """Those that are given, and what each would be under the others' names."""
    return {item.name: getattr(config.activation, item.name)
            for item in fields(nf.Activation) if item.name != "kind"}  # fmt: skip


SWAPPED = (("up_scale", "gate_scale"), ("alpha", "beta"), ("limit_gate", "limit_up"),
           ("inter_multiplier", "down_scale"), ("bias1", "bias2"),
           ("w1_scales", "w2_scales"))  # fmt: skip


def mistakes(case: Case) -> list[tuple[str, Given]]:
    """A name, and the arguments of the case as a wrong binding would hand them on."""
    config, weights, inputs = case.config(), swizzled(case, case.weights()), case.inputs()
    found: list[tuple[str, Given]] = []
    for item in fields(config):
        for value in other_values(item.name, getattr(config, item.name)):
            found.append((item.name, (replace(config, **{item.name: value}), weights, inputs)))
    for name, value in weights.items():
        if value is not None and name != "scale_layout":
            found.append((name, (config, {**weights, name: other_array(value)}, inputs)))
            found.append((f"no {name}", (config, {**weights, name: None}, inputs)))
    for name, value in inputs.items():
        if value is not None:
            found.append((f"run: {name}", (config, weights, {**inputs, name: other_array(value)})))
            found.append((f"run: no {name}", (config, weights, {**inputs, name: None})))
    parameters = activation_parameters(config)
    for one, two in SWAPPED:
        source = parameters if one in parameters else weights
        values = {one: source.get(two), two: source.get(one)}
        if source is weights:
            found.append((f"{one} and {two}", (config, {**weights, **values}, inputs)))
        else:
            changed = replace(config.activation, **values)
            found.append((f"{one} and {two}",
                          (replace(config, activation=changed), weights, inputs)))  # fmt: skip
    for name, value in parameters.items():
        if value is not None:
            changed = replace(config.activation, **{name: None})
            found.append((f"no {name}", (replace(config, activation=changed), weights, inputs)))
    return found


# Mistakes that no layer can run with: sizes that do not fit, an id of -1 that means nothing.
REFUSED = {"hidden", "inter", "experts", "shared_experts", "local_experts",
           "negative_one_is_empty", "w1_scales and w2_scales"}  # fmt: skip


def needed() -> set[str]:
    """Mistakes that must show as other bytes."""
    names = {item.name for item in fields(nf.MoeConfig)} - REFUSED
    names.remove("grouped_bias_bf16")  # See test_grouped_bias_is_rounded().
    per_layer = {"up_scale", "gate_scale", "down_scale", "inter_multiplier", "input_multiplier",
                 "bias1", "bias2"}  # fmt: skip
    names |= per_layer | {"w1", "w2", "w1_scales", "w2_scales"}
    names |= {f"no {name}" for name in per_layer - {"input_multiplier"}}
    names |= {f"no {item.name}" for item in fields(nf.Activation) if item.name != "kind"}
    names |= {f"run: {name}" for name in ("hidden", "hidden_scales", "row_scale", "logits", "bias",
                                          "packed", "ids", "weights")}  # fmt: skip
    names |= {"run: no bias", "run: no weights"}
    return names | {f"{one} and {two}" for one, two in SWAPPED} - REFUSED


def test_no_argument_is_idle() -> None:
    """A lost, changed or exchanged field shows in the bytes of at least one golden layer."""
    noticed: set[str] = set()
    refused: set[str] = set()
    for case in cases():
        right = run(case, case.config(), swizzled(case, case.weights()), case.inputs())
        for name, given in mistakes(case):
            if name in noticed:
                continue
            got = outcome(case, given)
            if got is None:
                refused.add(name)
            elif got != right:
                noticed.add(name)
    assert needed() - noticed == set()
    assert REFUSED - refused - noticed == set()


def test_grouped_bias_is_rounded() -> None:
    """To bfloat16, where 1 + 2^-9 is 1: then the groups tie, and the first one is kept."""
    w1, w2 = (np.ones(shape, ml_dtypes.bfloat16) for shape in ((8, 64, 32), (8, 32, 32)))
    bias = np.repeat(np.array([1, 1 + 2**-9], np.float32), 4)
    for rounds, ids in ((True, [0, 1]), (False, [4, 5])):
        config = nf.MoeConfig(hidden=32, inter=32, experts=8, top_k=2, method="deepseek_v3",
                              n_group=2, topk_group=1, grouped_bias_bf16=rounds)  # fmt: skip
        found = np.zeros((1, 2), np.int32)
        nf.MoeLayer.prepare(w1, w2, config).run(
            np.ones((1, 32), ml_dtypes.bfloat16), np.zeros((1, 8), np.float32), bias=bias,
            topk_ids=found,
        )  # fmt: skip
        assert sorted(found[0].tolist()) == ids


def test_every_mode_has_bytes_of_its_own() -> None:
    """Modes that take the same weights and rows."""
    pairs: dict[tuple[str, str], bool] = {}
    for case in cases():
        weights, inputs = swizzled(case, case.weights()), case.inputs()
        config = case.config()
        right = run(case, config, weights, inputs)
        for mode in MODES:
            got = outcome(case, (replace(config, mode=mode), weights, inputs))
            if mode != config.mode and got is not None:
                key = (config.mode, mode)
                pairs[key] = pairs.get(key, False) or got != right
    assert ("nvfp4_fp8_exact", "nvfp4_fp8_rounded") in pairs and len(pairs) >= 20
    assert [pair for pair, differs in pairs.items() if not differs] == []


TINY = ROOT / "models" / "tiny-moe"
FORMATS = {"fp8_tensor": "fp8_tensor", "fp8_block": "fp8_128x128", "mxfp8": "mxfp8",
           "mxfp4": "mxfp4", "nvfp4": "nvfp4"}  # fmt: skip
STATIC = {"fp8_tensor": 448.0, "nvfp4": 2688.0}  # Largest values of modes with static scales.


def stacked(mode: str, matrices: list[np.ndarray]) -> tuple[Any, Any, np.ndarray]:
    """Codes and linear scales of matrices below one another, and the factor of each."""
    fmt = weight_format(mode)
    if fmt == "bf16":
        return np.concatenate(matrices), None, np.ones(len(matrices), np.float32)
    parts = [nf.quantize(matrix, FORMATS[fmt], layout="linear") for matrix in matrices]
    codes, scales = (np.concatenate([getattr(q, name) for q in parts])
                     for name in ("values", "scales"))  # fmt: skip
    if fmt == "fp8_tensor":
        return codes, None, scales.reshape(-1)
    ones = np.ones(len(matrices), np.float32)
    factors = np.concatenate([q.global_scale for q in parts]) if fmt == "nvfp4" else ones
    return codes, scales, factors


@pytest.mark.parametrize("mode", MODES)
def test_layers_of_checkpoints_have_the_bytes_of_their_weights(mode: str) -> None:
    """Each projection of each expert quantized alone, the static multipliers by their formula."""
    reader = nf._core.SafetensorsReader.open(str(TINY / "model.safetensors"))
    static = {"input_amax": 5.0, "inter_amax": 3.0} if mode in STATIC else {}
    loaded = nf.MoeLayer.from_checkpoint(TINY, 1, mode=mode, out_dtype="float32", **static)
    config = loaded.config
    assert (config.mode, config.gate_order, config.out_dtype) == (mode, "gate_up", "float32")

    def projection(expert: int, name: str) -> np.ndarray:
        stored = f"model.layers.1.mlp.experts.{expert}.{name}_proj.weight"
        array = np.empty(reader.tensors()[stored][1], np.uint16)
        reader.read(stored, array)
        return array.view(ml_dtypes.bfloat16)

    def each(which: int, parts: list[tuple[Any, Any, np.ndarray]]) -> Any:
        return None if parts[0][which] is None else np.stack([part[which] for part in parts])

    first = [stacked(mode, [projection(e, "gate"), projection(e, "up")])
             for e in range(config.experts)]  # fmt: skip
    second = [stacked(mode, [projection(e, "down")]) for e in range(config.experts)]
    multipliers = [np.float32(1), np.float32(1)]
    if static:
        multipliers = [np.float32(STATIC[mode]) / np.float32(amax) for amax in static.values()]
        static = {"input_multiplier": float(multipliers[0]),
                  "inter_multiplier": float(multipliers[1])}  # fmt: skip
    both, down = each(2, first) / multipliers[0], each(2, second) / multipliers[1]
    made = nf.MoeLayer.prepare(
        each(0, first), each(0, second), config, w1_scales=each(1, first),
        w2_scales=each(1, second), gate_scale=both[:, 0].copy(), up_scale=both[:, 1].copy(),
        down_scale=down[:, 0].copy(), **static,
    )  # fmt: skip
    rng = np.random.default_rng(4)
    x = rng.standard_normal((7, config.hidden)).astype(ml_dtypes.bfloat16)
    logits = x.astype(np.float32) @ loaded.router_weight.T
    assert loaded.run(x, logits).tobytes() == made.run(x, logits).tobytes()


@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "bf16"])
def test_quantized_tensors_are_their_parts(mode: str, activation: str) -> None:
    """Values, scales and layout, and the global scales over the static multipliers as factors."""
    rng = np.random.default_rng(6)
    weights = [(rng.standard_normal(shape) / 8).astype(ml_dtypes.bfloat16)
               for shape in ((4, 256 if activation == "swiglu" else 128, 128),
                             (4, 128, 128))]  # fmt: skip
    fmt = FORMATS[weight_format(mode)]
    one, two = (nf.quantize(w, fmt, batched=True) for w in weights)
    config = nf.MoeConfig(hidden=128, inter=128, experts=4, top_k=2, mode=mode,
                          activation=nf.Activation(activation))  # fmt: skip
    static: dict[str, Any] = {}
    if mode in STATIC:
        static = {"input_multiplier": 610.0,
                  "inter_multiplier": np.array([150, 160, 170, 180], np.float32)}  # fmt: skip
    x = rng.standard_normal((9, 128)).astype(ml_dtypes.bfloat16)
    logits = rng.standard_normal((9, 4)).astype(np.float32)
    got = nf.MoeLayer.prepare(one, two, config, **static).run(x, logits)
    factors = [q.scales.reshape(-1) if fmt == "fp8_tensor" else q.global_scale for q in (one, two)]
    options: dict[str, Any] = {}
    if factors[0] is not None:
        first = np.broadcast_to(factors[0], 4) / np.float32(static.get("input_multiplier", 1))
        second = np.broadcast_to(factors[1], 4) / static.get("inter_multiplier", np.float32(1))
        options = {"up_scale": first, "down_scale": second}
        if activation == "swiglu":
            options["gate_scale"] = first
    if fmt != "fp8_tensor":
        options |= {"w1_scales": one.scales, "w2_scales": two.scales,
                    "scale_layout": one.scale_layout}  # fmt: skip
    parts = nf.MoeLayer.prepare(one.values, two.values, config, **options, **static)
    assert got.tobytes() == parts.run(x, logits).tobytes()
