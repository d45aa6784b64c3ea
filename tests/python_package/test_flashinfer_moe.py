"""narrowfloat.compat.flashinfer: Mixture-of-Experts functions against the independent model.

Weights are shuffled here as the specification's tables say (moe spec 7), row by row; the model gets
them in canonical order. Runs on the arrays that test_flashinfer_quantizers.py has.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from flashinfer_table import BITS, CLOSE, percent, record, record_part
from test_flashinfer_quantizers import LIBRARIES

import narrowfloat as nf
import narrowfloat.compat.flashinfer as fi

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "golden"))

import reference_model as model  # noqa: E402
import reference_moe as moe  # noqa: E402
import reference_routing as routing  # noqa: E402

T, H, I, E, K = 5, 256, 128, 8, 2
BF16, E4M3 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
# Largest distance of a run from the model (moe spec 12.3, G4).
FAR = {"bf16": 3e-3, "fp8_tensor": 2e-2, "fp8_block": 2e-2, "mxfp8": 5e-3, "mxfp4_mxfp8": 5e-3,
       "mxfp4_bf16": 3e-3, "nvfp4": 1.5e-2, "nvfp4_per_token": 3e-2}  # fmt: skip


@pytest.fixture(params=LIBRARIES, ids=lambda lib: lib.__name__)
def lib(request: pytest.FixtureRequest) -> Any:
    """Where arrays come from."""
    return request.param


def shuffled_row(row: int, block: int) -> int:
    """New place of a row (spec 8.7)."""
    j = row % block
    step = 4 if block == 32 else 2
    return row - j + 8 * (j % step) + j // step


def prepared(w: np.ndarray, block: int, interleave: bool) -> np.ndarray:
    """[experts, rows, ...] as FlashInfer wants them: up and gate alternating, then shuffled."""
    rows = w.shape[1]
    moved = np.empty_like(w)
    for row in range(rows):
        place = row
        if interleave:
            place = 2 * row if row < rows // 2 else 2 * (row - rows // 2) + 1
        moved[:, shuffled_row(place, block)] = w[:, row]
    return moved


def prepared_scales(s: np.ndarray, interleave: bool) -> np.ndarray:
    """Linear scales moved with their rows, then swizzled, in the shape of the linear ones."""
    moved = prepared(s, 32, interleave)
    return np.stack([model.pack_scales(part, "swizzled_128x4") for part in moved]).reshape(s.shape)


def block_major(w: np.ndarray) -> np.ndarray:
    """[experts, rows, cols] as [experts, cols / B, rows, B]; B is 128 bytes."""
    width = 128 // w.itemsize
    return np.stack([w[:, :, k : k + width] for k in range(0, w.shape[2], width)], 1)


class Data:
    """A random layer in a mode, canonical, and what the model says about a run."""

    def __init__(self, mode: str, kind: str = "swiglu", **each: Any) -> None:
        self.mode, self.kind, self.gated = mode, kind, kind in moe.GATED
        # The same numbers whatever tests ran before: the model refuses a few.
        self.rng = np.random.default_rng([31, *f"{mode} {kind}".encode()])
        info = moe.MODES[mode]
        f1 = 2 * I if self.gated else I
        self.w1, self.s1, self.g1 = self.weights(info.weights, f1, H)
        self.w2, self.s2, self.g2 = self.weights(info.weights, H, I)
        self.logits = self.rng.standard_normal((T, E)).astype(np.float32)
        self.x = self.rng.standard_normal((T, H)).astype(BF16)
        self.input_multiplier = np.float32({"fp8_tensor": 100, "nvfp4": 600}.get(mode, 1))
        self.c_sf = np.float32({"fp8_tensor": 40, "nvfp4": 150}.get(mode, 1))
        self.rows = moe.quantize_rows(info.input, self.x.astype(np.float32),
                                      np.full(T, self.input_multiplier), "BF16") \
            if info.input != "bf16" else moe.Rows("bf16", self.x.view(np.uint16))  # fmt: skip
        ones = np.ones(E, np.float32)
        first = (self.g1 / self.input_multiplier).astype(np.float32)
        self.each = {
            "up_scale": ones * first, "gate_scale": ones * first,
            "down_scale": ones * np.float32(self.g2 / self.c_sf),
            "inter_multiplier": ones * self.c_sf,
            "alpha": ones, "beta": 0 * ones, "limit_gate": ones * np.inf, "limit_up": ones * np.inf,
            **each,
        }  # fmt: skip
        self.bias1: np.ndarray | None = None
        self.bias2: np.ndarray | None = None

    def weights(self, format: str, rows: int, cols: int) -> tuple[np.ndarray, Any, np.float32]:
        """Codes, linear scales, factor."""
        w = (self.rng.standard_normal((E, rows, cols)) / np.sqrt(cols)).astype(BF16)
        if format == "bf16":
            return w, None, np.float32(1)
        if format == "fp8_tensor":
            factor = np.float32(np.abs(w.astype(np.float32)).max() / 448)
            return (w.astype(np.float32) / factor).astype(E4M3), None, factor
        ours = {"fp8_block": "fp8_128x128"}.get(format, format)
        q = nf.quantize(w, ours, batched=True, layout="linear")
        codes = q.values.view(E4M3) if format in ("fp8_block", "mxfp8") else q.values
        return codes, q.scales, np.float32(1 if q.global_scale is None else q.global_scale[0])

    def expected(self, routed: routing.Routed, offset: int = 0, local: int = E,
                 **options: Any) -> np.ndarray:  # fmt: skip
        """float64 [T, H] of the model, with the weights of a shard."""

        def raw(array: Any) -> Any:
            return None if array is None else array.view({1: np.uint8, 2: np.uint16, 4: np.float32}[
                array.itemsize])[offset : offset + local]  # fmt: skip

        layer = moe.Layer(
            moe.MODES[self.mode], self.kind, "up_gate", raw(self.w1), raw(self.w2), raw(self.s1),
            raw(self.s2), {k: v[offset : offset + local] for k, v in self.each.items()},
            bias1=self.bias1, bias2=self.bias2, **options,
        )  # fmt: skip
        out = moe.run(layer, self.rows, routed, offset, local).out
        return moe.decode_float(out, "BF16").astype(np.float64)

    def routed(self, **router: Any) -> routing.Routed:
        """From the logits."""
        options = {"method": 1, "weights_bf16": True, **router}
        return routing.route_logits(self.logits, options.pop("bias", None),
                                    routing.Router(E, K, **options))  # fmt: skip


def check(lib: Any, got: Any, wanted: np.ndarray, mode: str) -> None:
    """Frobenius distance."""
    out = np.frombuffer(lib.raw(got), BF16).reshape(wanted.shape).astype(np.float64)
    distance = np.linalg.norm(out - wanted) / np.linalg.norm(wanted)
    assert distance < FAR[mode], distance


def sizes(**changes: Any) -> dict[str, Any]:
    """Arguments that all entry points share."""
    return {"num_experts": E, "top_k": K, "n_group": None, "topk_group": None,
            "intermediate_size": I, "local_expert_offset": 0, "local_num_experts": E,
            "routed_scaling_factor": None, "routing_method_type": 1, **changes}  # fmt: skip


def given(data: Data, lib: Any, form: str) -> Any:
    """The routing of the logits as ids: packed, or ids and float32 weights."""
    routed = data.routed()
    ids, weights = routed.ids.astype(np.int32), routed.rounded()
    if form == "packed":
        return lib.make(routing.pack(ids, weights))
    return lib.make(ids), lib.make(weights)


def test_bf16(lib: Any) -> None:
    """From logits and from given routings; shuffled or not; a shard; in pieces."""
    data = Data("bf16")
    wanted = data.expected(data.routed())
    w1 = lib.make(block_major(prepared(data.w1, 32, True)))
    w2 = lib.make(block_major(prepared(data.w2, 32, False)))
    x, logits = lib.make(data.x), lib.make(data.logits)
    got = fi.trtllm_bf16_moe(logits, None, x, w1, w2, **sizes())
    check(lib, got, wanted, "bf16")
    plain = fi.trtllm_bf16_moe(logits, None, x, lib.make(data.w1), lib.make(data.w2), **sizes(),
                               use_shuffled_weight=False, weight_layout=0)  # fmt: skip
    assert lib.raw(plain) == lib.raw(got)
    unrouted = sizes()
    for form in ("packed", "ids"):
        other = fi.trtllm_bf16_routed_moe(given(data, lib, form), x, w1, w2, **unrouted)
        assert lib.raw(other) == lib.raw(got)
    pieces = fi.trtllm_bf16_moe(logits, None, x, w1, w2, **sizes(), do_finalize=False)
    joined = nf.combine(pieces[0], pieces[2], pieces[1])
    assert lib.raw(joined) == lib.raw(got)
    half = fi.trtllm_bf16_moe(
        logits, None, x, lib.make(block_major(prepared(data.w1[2:6], 32, True))),
        lib.make(block_major(prepared(data.w2[2:6], 32, False))),
        **sizes(local_expert_offset=2, local_num_experts=4),
    )  # fmt: skip
    check(lib, half, data.expected(data.routed(), 2, 4), "bf16")
    out = lib.make(np.zeros((T, H), BF16))
    replay = lib.make(np.zeros((T, K), np.int16))
    same = fi.trtllm_bf16_moe(logits, None, x, w1, w2, **sizes(), output=out,
                              routing_replay_out=replay)  # fmt: skip
    assert same is out and lib.raw(out) == lib.raw(got)
    assert lib.raw(replay) == data.routed().ids.astype(np.int16).tobytes()
    note = "any of both layouts, shuffled or not"
    record("trtllm_bf16_moe", CLOSE, note, percent([FAR["bf16"]]))
    record("trtllm_bf16_routed_moe", CLOSE, note, percent([FAR["bf16"]]))


def test_activation_parameters(lib: Any) -> None:
    """gpt-oss's SwiGLU, and one without a gate."""
    limit = np.full(E, 0.8, np.float32)
    data = Data("bf16", alpha=np.full(E, 1.702, np.float32), beta=np.ones(E, np.float32),
                limit_gate=limit, limit_up=limit)  # fmt: skip
    w1 = lib.make(block_major(prepared(data.w1, 32, True)))
    w2 = lib.make(block_major(prepared(data.w2, 32, False)))
    got = fi.trtllm_bf16_moe(
        lib.make(data.logits), None, lib.make(data.x), w1, w2, **sizes(),
        gemm1_alpha=lib.make(data.each["alpha"]), gemm1_beta=lib.make(data.each["beta"]),
        gemm1_clamp_limit=lib.make(limit),
    )  # fmt: skip
    check(lib, got, data.expected(data.routed()), "bf16")
    plain = Data("bf16", "relu2")
    got = fi.trtllm_bf16_moe(
        lib.make(plain.logits), None, lib.make(plain.x),
        lib.make(block_major(prepared(plain.w1, 32, False))),
        lib.make(block_major(prepared(plain.w2, 32, False))), **sizes(),
        activation_type=fi.ActivationType.Relu2,
    )  # fmt: skip
    check(lib, got, plain.expected(plain.routed()), "bf16")


@pytest.mark.parametrize("kind", ["swiglu", "relu2", "swiglu_step"])
def test_fp8_per_tensor(lib: Any, kind: str) -> None:
    """Folded scalars of gated and of plain activations; limits in units of the accumulator."""
    limits = np.linspace(0.2, 0.8, E, dtype=np.float32)
    steps = {"limit_gate": limits, "limit_up": limits} if kind == "swiglu_step" else {}
    data = Data("fp8_tensor", kind, **steps)
    scale = data.each["up_scale"]
    folded = scale * data.c_sf if data.gated else np.full(E, data.c_sf)
    clamp = {"gemm1_clamp_limit": lib.make(limits / scale)} if steps else {}
    arguments = (
        lib.make(data.rows.codes.view(E4M3)), lib.make(prepared(data.w1, 32, data.gated)),
        lib.make(folded.astype(np.float32)), lib.make(scale),
        lib.make(prepared(data.w2, 32, False)), lib.make(data.each["down_scale"]),
    )  # fmt: skip
    number = {"swiglu": 3, "relu2": 6, "swiglu_step": 7}[kind]
    call = {"use_routing_scales_on_input": False, "activation_type": number, **clamp}
    got = fi.trtllm_fp8_per_tensor_scale_moe(
        lib.make(data.logits), None, *arguments, **sizes(), **call
    )
    check(lib, got, data.expected(data.routed()), "fp8_tensor")
    other = fi.trtllm_fp8_per_tensor_scale_routed_moe(
        given(data, lib, "packed"), None, *arguments, **sizes(), **call
    )
    assert lib.raw(other) == lib.raw(got)
    if steps:
        wide = fi.trtllm_fp8_per_tensor_scale_moe(  # A limit of 7, which is the default.
            lib.make(data.logits), None, *arguments, **sizes(), **call | {"gemm1_clamp_limit": None}
        )
        assert lib.raw(wide) != lib.raw(got)
        with pytest.raises(ValueError, match="gemm1_clamp_limit: .*ActivationType.SwigluStep only"):
            fi.trtllm_fp8_per_tensor_scale_moe(lib.make(data.logits), None, *arguments, **sizes(),
                                               **call | {"activation_type": 3})  # fmt: skip
    within = percent([FAR["fp8_tensor"]])
    record("trtllm_fp8_per_tensor_scale_moe", CLOSE, within=within)
    record("trtllm_fp8_per_tensor_scale_routed_moe", CLOSE, within=within)


def test_fp8_block(lib: Any) -> None:
    """DeepSeek's scales, in the three forms of weights; grouped routing with a bias."""
    data = Data("fp8_block")
    bias = np.linspace(-0.2, 0.2, E).astype(np.float32)
    router = {"method": 2, "n_group": 4, "topk_group": 2, "scale": 2.5, "bias": bias,
              "grouped_bias_bf16": True}  # fmt: skip
    wanted = data.expected(data.routed(**router))
    codes = lib.make(data.rows.codes.view(E4M3))
    scales = lib.make(np.ascontiguousarray(data.rows.scales.T))
    s1, s2 = lib.make(data.s1), lib.make(data.s2)
    shape = sizes(routing_method_type=2, n_group=4, topk_group=2, routed_scaling_factor=2.5)
    results = []
    for shuffled, layout in ((False, 0), (True, 0), (True, 2)):
        w1, w2 = (prepared(w, 16, False) if shuffled else w for w in (data.w1, data.w2))
        if layout == 2:
            w1, w2 = block_major(w1), block_major(w2)
        got = fi.trtllm_fp8_block_scale_moe(
            lib.make(data.logits), lib.make(bias), codes, scales, lib.make(w1), s1, lib.make(w2),
            s2, **shape, use_shuffled_weight=shuffled, weight_layout=layout,
        )  # fmt: skip
        check(lib, got, wanted, "fp8_block")
        results.append(lib.raw(got))
    assert len(set(results)) == 1
    w1, w2 = lib.make(data.w1), lib.make(data.w2)
    got = fi.trtllm_fp8_block_scale_routed_moe(
        given(data, lib, "ids"), None, codes, scales, w1, s1, w2, s2, **sizes()
    )
    check(lib, got, data.expected(data.routed()), "fp8_block")
    with pytest.raises(NotImplementedError, match="weight_layout"):
        fi.trtllm_fp8_block_scale_moe(lib.make(data.logits), None, codes, scales, w1, s1, w2, s2,
                                      **sizes(), weight_layout=1)  # fmt: skip
    with pytest.raises(ValueError, match="fp8_quantization_type"):
        fi.trtllm_fp8_block_scale_moe(lib.make(data.logits), None, codes, scales, w1, s1, w2, s2,
                                      **sizes(), fp8_quantization_type=0)  # fmt: skip


def test_mxfp8(lib: Any) -> None:
    """The same entry point with 1x32 scales."""
    data = Data("mxfp8")
    arguments = (
        lib.make(data.rows.codes.view(E4M3)), lib.make(data.rows.scales),
        lib.make(prepared(data.w1, 32, True)), lib.make(prepared_scales(data.s1, True)),
        lib.make(prepared(data.w2, 32, False)), lib.make(prepared_scales(data.s2, False)),
    )  # fmt: skip
    kind = {"fp8_quantization_type": fi.Fp8QuantizationType.MxFp8, "use_shuffled_weight": True}
    got = fi.trtllm_fp8_block_scale_moe(lib.make(data.logits), None, *arguments, **sizes(), **kind)
    check(lib, got, data.expected(data.routed()), "mxfp8")
    other = fi.trtllm_fp8_block_scale_routed_moe(given(data, lib, "packed"), None, *arguments,
                                                 **sizes(), **kind)  # fmt: skip
    assert lib.raw(other) == lib.raw(got)
    with pytest.raises(ValueError, match="^use_shuffled_weight: "):
        fi.trtllm_fp8_block_scale_moe(lib.make(data.logits), None, *arguments, **sizes(),
                                      **{**kind, "use_shuffled_weight": False})  # fmt: skip
    within = percent([FAR["fp8_block"], FAR["mxfp8"]])
    record("trtllm_fp8_block_scale_moe", CLOSE, "rounds the intermediate once, upstream twice",
           within)  # fmt: skip
    record("trtllm_fp8_block_scale_routed_moe", CLOSE, "rounds the intermediate once", within)


def fp4_arguments(lib: Any, data: Data, typed: bool = True) -> dict[str, Any]:
    """Weights and scalars of the FP4 entry point. UE8M0 scales come typed float8_e4m3fn."""
    scale, gated = data.each["up_scale"], data.gated
    s1, s2 = prepared_scales(data.s1, gated), prepared_scales(data.s2, False)
    folded = scale * data.c_sf if gated else np.full(E, data.c_sf, np.float32)
    per_tensor = data.mode.startswith("nvfp4")
    kind = E4M3 if typed else np.uint8
    return {
        "gemm1_weights": lib.make(prepared(data.w1, 32, gated)),
        "gemm1_weights_scale": lib.make(s1.view(kind)),
        "gemm1_bias": None, "gemm1_alpha": None, "gemm1_beta": None, "gemm1_clamp_limit": None,
        "gemm2_weights": lib.make(prepared(data.w2, 32, False)),
        "gemm2_weights_scale": lib.make(s2.view(kind)),
        "gemm2_bias": None,
        "output1_scale_scalar": lib.make(folded.astype(np.float32)) if per_tensor else None,
        "output1_scale_gate_scalar": lib.make(scale) if per_tensor else None,
        "output2_scale_scalar": lib.make(data.each["down_scale"]) if per_tensor else None,
    }  # fmt: skip


@pytest.mark.parametrize("mode", ["nvfp4", "nvfp4_per_token", "mxfp4_mxfp8", "mxfp4_bf16"])
@pytest.mark.parametrize("kind", ["swiglu", "relu2"])
def test_fp4(lib: Any, mode: str, kind: str) -> None:
    """The formats that the entry point detects, gated and not."""
    data = Data(mode, kind)
    arguments = fp4_arguments(lib, data)
    rows, scales = data.rows.codes, data.rows.scales
    if mode == "mxfp4_mxfp8":
        rows = rows.view(E4M3)
    if mode == "mxfp4_bf16":
        rows = data.x
    inputs = {"hidden_states": lib.make(rows),
              "hidden_states_scale": None if scales is None else lib.make(scales.view(E4M3)),
              "activation_type": {"swiglu": 3, "relu2": 6}[kind]}  # fmt: skip
    if mode == "nvfp4_per_token":
        inputs["per_token_scale"] = lib.make(data.rows.row_scale)
    wanted = data.expected(data.routed())
    (got,) = fi.trtllm_fp4_block_scale_moe(lib.make(data.logits), None, **inputs, **arguments,
                                           **sizes())  # fmt: skip
    check(lib, got, wanted, mode)
    (other,) = fi.trtllm_fp4_block_scale_routed_moe(
        given(data, lib, "packed"), None, **inputs, **arguments, **sizes()
    )
    assert lib.raw(other) == lib.raw(got)
    narrow = lib.make(np.zeros((T, H - 16), BF16))
    fi.trtllm_fp4_block_scale_moe(lib.make(data.logits), None, **inputs, **arguments, **sizes(),
                                  output=narrow)  # fmt: skip
    cut = np.frombuffer(lib.raw(got), BF16).reshape(T, H)[:, : H - 16]
    assert lib.raw(narrow) == np.ascontiguousarray(cut).tobytes()
    note = "not MXFP4 with per-tensor FP8 rows; no bias with `per_token_scale`"
    within = percent([far for mode, far in FAR.items() if "fp4" in mode])
    record("trtllm_fp4_block_scale_moe", CLOSE, note, within)
    record("trtllm_fp4_block_scale_routed_moe", CLOSE, note, within)


def test_fp4_bias_and_limits(lib: Any) -> None:
    """Parameters that callers divide by the scales come back into real units."""
    limit = np.full(E, 0.7, np.float32)
    data = Data("nvfp4", limit_gate=limit, limit_up=limit, beta=np.ones(E, np.float32))
    scale = data.each["up_scale"]
    data.bias1 = data.rng.standard_normal((E, 2 * I)).astype(np.float32) / 4
    data.bias2 = data.rng.standard_normal((E, H)).astype(np.float32) / 4
    arguments = fp4_arguments(lib, data) | {
        "gemm1_bias": lib.make(prepared(data.bias1 / scale[:, None], 32, True)),
        "gemm2_bias": lib.make(
            prepared(data.bias2 / data.each["down_scale"][:, None], 32, False)
        ),
        "gemm1_beta": lib.make(np.ones(E, np.float32) / scale),
        "gemm1_clamp_limit": lib.make(limit / scale),
    }
    # up's factor contains the multiplier of the intermediate, so bias, beta and limit do, too.
    inputs = {"hidden_states": lib.make(data.rows.codes),
              "hidden_states_scale": lib.make(data.rows.scales.view(E4M3))}  # fmt: skip
    (got,) = fi.trtllm_fp4_block_scale_moe(lib.make(data.logits), None, **inputs, **arguments,
                                           **sizes())  # fmt: skip
    check(lib, got, data.expected(data.routed()), "nvfp4")
    with pytest.raises(NotImplementedError, match="per_token_scale"):
        fi.trtllm_fp4_block_scale_moe(
            lib.make(data.logits), None, **inputs, **arguments, **sizes(),
            per_token_scale=lib.make(np.ones(T, np.float32)),
        )  # fmt: skip


def cutlass(lib: Any, data: Data, rows: Any, w1: Any, w2: Any, scales: list, **options: Any) -> Any:
    """cutlass_fused_moe() with the routing of the logits."""
    ids, weights = given(data, lib, "ids")
    (out,) = fi.cutlass_fused_moe(rows, ids, weights, w1, w2, "bfloat16", scales, **options)
    return out


def words(lib: Any, array: np.ndarray, dtype: Any) -> Any:
    """Bytes typed as larger integers."""
    return lib.make(np.ascontiguousarray(array).view(dtype))


def swizzled_scales(scales: np.ndarray) -> np.ndarray:
    """Linear scales in layout 128x4, as int32 [experts, rows, blocks / 4]."""
    packed = np.stack([model.pack_scales(part, "swizzled_128x4") for part in scales])
    return packed.reshape(scales.shape).view(np.int32)


def test_cutlass(lib: Any) -> None:
    """All modes that are offered."""
    data = Data("bf16")
    w1, w2, x = lib.make(data.w1), lib.make(data.w2), lib.make(data.x)
    check(lib, cutlass(lib, data, x, w1, w2, []), data.expected(data.routed()), "bf16")
    shard = cutlass(lib, data, x, lib.make(data.w1[4:]), lib.make(data.w2[4:]), [], ep_size=2,
                    ep_rank=1)  # fmt: skip
    check(lib, shard, data.expected(data.routed(), 4, 4), "bf16")
    record_part("cutlass_fused_moe", "bf16")

    data = Data("fp8_tensor")
    scalars = [lib.make(data.each["up_scale"]), lib.make(np.float32([data.c_sf])),
               lib.make(data.each["down_scale"]), lib.make(np.float32([1]))]  # fmt: skip
    got = cutlass(lib, data, lib.make(data.rows.codes.view(E4M3)), lib.make(data.w1),
                  lib.make(data.w2), scalars)  # fmt: skip
    check(lib, got, data.expected(data.routed()), "fp8_tensor")
    record_part("cutlass_fused_moe", "FP8")

    data = Data("fp8_block")
    got = cutlass(lib, data, lib.make(data.x), lib.make(data.w1), lib.make(data.w2),
                  [lib.make(data.s1), lib.make(data.s2)],
                  use_deepseek_fp8_block_scale=True)  # fmt: skip
    check(lib, got, data.expected(data.routed()), "fp8_block")
    record_part("cutlass_fused_moe", "DeepSeek")

    data = Data("nvfp4")
    scalars = [lib.make(np.float32([data.input_multiplier])), lib.make(swizzled_scales(data.s1)),
               lib.make(data.each["up_scale"]), lib.make(np.float32([data.c_sf])),
               lib.make(swizzled_scales(data.s2)), lib.make(data.each["down_scale"])]  # fmt: skip
    codes = words(lib, data.w1, np.int64), words(lib, data.w2, np.int64)
    wanted = data.expected(data.routed())
    plain = cutlass(lib, data, lib.make(data.x), *codes, scalars)
    check(lib, plain, wanted, "nvfp4")
    linear = cutlass(lib, data, lib.make(data.rows.codes), *codes, scalars,
                     input_sf=lib.make(data.rows.scales), swizzled_input_sf=False)  # fmt: skip
    swizzled = model.pack_scales(data.rows.scales, "swizzled_128x4")
    swizzled = cutlass(lib, data, lib.make(data.rows.codes), *codes, scalars,
                       input_sf=lib.make(swizzled))  # fmt: skip
    assert lib.raw(linear) == lib.raw(swizzled) == lib.raw(plain)
    record_part("cutlass_fused_moe", "NVFP4")

    for mode in ("mxfp4_mxfp8", "mxfp8"):
        data = Data(mode)
        scalars = [lib.make(swizzled_scales(data.s1)), lib.make(data.each["up_scale"]),
                   lib.make(swizzled_scales(data.s2)),
                   lib.make(data.each["down_scale"])]  # fmt: skip
        codes = (lib.make(data.w1), lib.make(data.w2)) if mode == "mxfp8" else (
            words(lib, data.w1, np.int64), words(lib, data.w2, np.int64))  # fmt: skip
        got = cutlass(lib, data, lib.make(data.rows.codes.view(E4M3)), *codes, scalars,
                      input_sf=lib.make(data.rows.scales), swizzled_input_sf=False,
                      use_mxfp8_act_scaling=True)  # fmt: skip
        check(lib, got, data.expected(data.routed()), mode)
        record_part("cutlass_fused_moe", {"mxfp8": "MXFP8"}.get(mode, "MXFP4 x MXFP8"))
    record("cutlass_fused_moe", CLOSE, "fp16 is computed in bf16; not INT4, Humming, "
           "`ClampedRelu2`; `min_latency_mode` is refused, as upstream",
           percent(FAR.values()))  # fmt: skip


def test_gen_routing(lib: Any) -> None:
    """Router and permutation against the model."""
    logits = np.random.default_rng(33).standard_normal((13, E)).astype(np.float32)
    bias = np.linspace(-1, 1, E).astype(np.float32)
    for method in range(10):
        k = 1 if method == 3 else K
        router = routing.Router(E, k, method, weights_bf16=True,
                                scale=2.5 if method in (2, 7) else 1.0)  # fmt: skip
        reads_bias = method in (2, 7)
        groups = {"n_group": 1, "topk_group": 1} if method == 2 else {}
        routed = routing.route_logits(logits, bias if reads_bias else None, router)
        got = fi.trtllm_gen_routing(lib.make(logits), lib.make(bias), method, k,
                                    local_expert_offset=2, local_num_experts=4,
                                    routed_scaling_factor=2.5, **groups)  # fmt: skip
        maps = moe.permute(routed.ids, 2, 4, 8)
        local = np.where((routed.ids >= 2) & (routed.ids < 6), routed.ids, -1).astype(np.int32)
        assert lib.raw(got.topk_ids) == local.tobytes()
        weights = np.frombuffer(lib.raw(got.topk_weights), BF16).reshape(13, k)
        assert np.allclose(weights.astype(np.float64), routed.weights, rtol=2**-7)
        assert lib.raw(got.expanded_idx_to_permuted_idx) == np.int32(maps.slot_to_row).tobytes()
        assert int(got.total_num_padded_tokens[0]) == maps.num_rows
        experts = maps.tile_to_expert
        assert list(got.cta_idx_xy_to_batch_idx[: len(experts)]) == experts
    with pytest.raises(ValueError, match="routing_method"):
        fi.trtllm_gen_routing(lib.make(logits), None, fi.RoutingMethodType.Unspecified, 2)
    with pytest.raises(ValueError, match="routing_logits"):
        fi.trtllm_gen_routing(lib.make(logits[0]), None, 1, 2)
    with pytest.raises(ValueError, match="n_group"):
        fi.trtllm_gen_routing(lib.make(logits), None, 1, 2, n_group=4)
    record("trtllm_gen_routing", CLOSE, "ranks are stable",
           "ids to the bit, weights an ulp of bfloat16")


SHARES = ({}, {"local_expert_offset": 8, "local_num_experts": 8},
          {"local_expert_offset": 0, "local_num_experts": 8})  # fmt: skip


@pytest.mark.parametrize("share", SHARES, ids=["all", "last", "first"])
def test_gen_routing_with_shared_experts(lib: Any, share: dict[str, int]) -> None:
    """Slots of weight 1 after the k of DeepSeekV3 with groups; a shard has S experts more.

    The kernel counts them at the end of every shard: only the last one has shared experts there.
    """
    tokens, experts, k, shared, tile = 13, 16, 4, 2, 4
    logits = np.random.default_rng(36).standard_normal((tokens, experts)).astype(np.float32)
    bias = np.linspace(-1, 1, experts).astype(np.float32)
    router = routing.Router(experts, k, 2, shared, 4, 2, 2.5, grouped_bias_bf16=True)
    routed = routing.route_logits(logits, bias, router)
    assert np.array_equal(routed.ids[:, k:], [[16, 17]] * tokens)
    got = fi.trtllm_gen_routing(
        lib.make(logits), lib.make(bias), 2, k, num_fused_shared_experts=shared, n_group=4,
        topk_group=2, routed_scaling_factor=2.5, tile_tokens_dim=tile, **share,
    )  # fmt: skip
    first = share.get("local_expert_offset", 0)
    local = share.get("local_num_experts", experts) + shared
    maps = moe.permute(routed.ids, first, local, tile)
    inside = (routed.ids >= first) & (routed.ids < first + local)
    assert lib.raw(got.topk_ids) == np.where(inside, routed.ids, -1).astype(np.int32).tobytes()
    weights = np.frombuffer(lib.raw(got.topk_weights), BF16).reshape(tokens, k + shared)
    assert np.allclose(weights.astype(np.float64), routed.weights, rtol=2**-7)
    assert np.array_equal(weights[:, k:], np.ones((tokens, shared)))
    assert lib.raw(got.expanded_idx_to_permuted_idx) == np.int32(maps.slot_to_row).tobytes()
    assert int(got.total_num_padded_tokens[0]) == maps.num_rows
    tiles = len(maps.tile_to_expert)
    assert int(got.num_non_exiting_ctas[0]) == tiles
    assert list(got.cta_idx_xy_to_batch_idx[:tiles]) == maps.tile_to_expert
    # The arrays have places for all experts, also those of other shards.
    slots, total = tokens * (k + shared), experts + shared
    most = total + (slots - total) // tile
    assert tuple(got.cta_idx_xy_to_batch_idx.shape) == tuple(got.cta_idx_xy_to_mn_limit.shape)
    assert tuple(got.cta_idx_xy_to_mn_limit.shape) == (most,)
    assert tuple(got.permuted_idx_to_token_idx.shape) == (most * tile,)
    tokens_of_rows = np.frombuffer(lib.raw(got.permuted_idx_to_token_idx), np.int32)
    rows = np.int32(maps.slot_to_row).reshape(tokens, -1)
    filled = {int(row): token for token in range(tokens) for row in rows[token] if row >= 0}
    assert all(tokens_of_rows[row] == filled.get(row, -1) for row in range(maps.num_rows))


def test_shared_experts_of_a_layer(lib: Any) -> None:
    """Four routed experts in groups and four shared ones, whose weights follow."""
    data = Data("fp8_block")
    data.logits = np.ascontiguousarray(data.logits[:, :4])
    bias = np.linspace(-0.2, 0.2, 4).astype(np.float32)
    router = routing.Router(4, K, 2, 4, 2, 2, 2.5, weights_bf16=True, grouped_bias_bf16=True)
    routed = routing.route_logits(data.logits, bias, router)
    wanted = data.expected(routed)
    arguments = [lib.make(part) for part in (
        data.logits, bias, data.rows.codes.view(E4M3), np.ascontiguousarray(data.rows.scales.T),
        data.w1, data.s1, data.w2, data.s2)]  # fmt: skip
    shape = sizes(num_experts=4, local_num_experts=4, routing_method_type=2, topk_group=2,
                  routed_scaling_factor=2.5, num_fused_shared_experts=4)  # fmt: skip
    replay = lib.make(np.full((T + 1, K), -7, np.int16))
    got = fi.trtllm_fp8_block_scale_moe(*arguments, **shape | {"n_group": 2},
                                        routing_replay_out=replay)  # fmt: skip
    check(lib, got, wanted, "fp8_block")
    ids = np.vstack([routed.ids[:, :K], [[-7] * K]]).astype(np.int16)  # Routed ones alone.
    assert lib.raw(replay) == ids.tobytes()
    with pytest.raises(ValueError, match="routing_replay_out: expected"):
        fi.trtllm_fp8_block_scale_moe(*arguments, **shape | {"n_group": 2},
                                      routing_replay_out=replay[:2])  # fmt: skip
    with pytest.raises(RuntimeError, match="does not support fusing shared expert"):
        fi.trtllm_fp8_block_scale_moe(*arguments, **shape | {"n_group": 1, "topk_group": 1})


def test_other_routing_functions(lib: Any) -> None:
    """fused_topk_deepseek() into given arrays, moe_sort() under its names."""
    logits = np.random.default_rng(34).standard_normal((6, E)).astype(np.float32)
    bias = np.linspace(-0.5, 0.5, E).astype(np.float32)
    values, ids = lib.make(np.zeros((6, K), np.float32)), lib.make(np.zeros((6, K), np.int32))
    fi.fused_topk_deepseek(lib.make(logits), lib.make(bias), 4, 2, K, 2.5, values, ids)
    router = routing.Router(E, K, 2, n_group=4, topk_group=2, scale=2.5)
    routed = routing.route_logits(logits, bias, router)
    assert lib.raw(ids) == routed.ids.astype(np.int32).tobytes()
    found = np.frombuffer(lib.raw(values), np.float32).reshape(6, K)
    assert np.allclose(found, routed.weights, rtol=1e-6)
    record("fused_topk_deepseek", CLOSE, within="ids to the bit, weights 1e-6")
    maps = moe.permute(routed.ids, 0, E, 16)
    rows = lib.make(np.zeros((6, K), np.int32))
    got = fi.moe_sort(ids, values, E, K, tile_tokens_dim=16,
                      out_expanded_idx_to_permuted_idx=rows)  # fmt: skip
    assert got[2] is rows and lib.raw(rows) == np.int32(maps.slot_to_row).tobytes()
    assert int(got[4][0]) == maps.num_rows and len(got) == 6
    record("moe_sort", BITS, "upstream's ranks inside an expert are not contractual")
