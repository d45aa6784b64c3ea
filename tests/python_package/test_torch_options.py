"""narrowfloat.torch: every option of operators against the package's functions, and opcheck."""

from __future__ import annotations

from typing import Any

import pytest

import narrowfloat as nf

torch = pytest.importorskip("torch", reason="torch is not installed; ./test.sh --with-torch")

from torch_op_cases import moved, on_each_device  # noqa: E402

import narrowfloat.torch as nft  # noqa: E402

OPS = torch.ops.narrowfloat
X = torch.randn(4, 4, 256, generator=torch.Generator().manual_seed(7)).bfloat16()


def ints(*values: int, dtype: Any = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


# Format, layout, options.
CASES: dict[str, tuple[str, str | None, dict[str, Any]]] = {
    "four_over_six": ("nvfp4", None, {"four_over_six": nf.FourOverSix()}),
    "its fields": ("nvfp4", "linear", {"four_over_six": nf.FourOverSix("mse", "fast", 256)}),
    "base_decode_scale": ("nvfp4_per_token", None, {"base_decode_scale": 0.25}),
    "base_decode_scale tensor": ("nvfp4_per_token", None,
                                 {"base_decode_scale": torch.tensor([0.25])}),
    "row_list": ("nvfp4_per_token", "linear", {"row_list": ints(3, 9, 0)}),
    "valid_rows": ("nvfp4", None, {"batched": True, "valid_rows": ints(4, 1, 0, 3)}),
    "batch scales": ("nvfp4", None, {"batched": True, "valid_rows": ints(2, 4, 0, 3),
                                     "encode_scale": torch.tensor([9.0, 90.0, 900.0, 1.0])}),
    "one scale": ("nvfp4", None, {"batched": True, "valid_rows": ints(2, 4, 0, 3),
                                  "encode_scale": torch.tensor([90.0])}),
    "mxfp4 rows": ("mxfp4", None, {"batched": True, "valid_rows": ints(1, 1, 2, 3)}),
    "row_offsets": ("fp8_1x128", "mn_major", {"row_offsets": ints(0, 5, 5, 16, dtype=torch.int64)}),
    "fp8_rule": ("fp8_1x128", None, {"fp8_rule": "pow2_ceil", "fp8_eps": 0.5}),
    "fp8_eps": ("fp8_128x128", None, {"fp8_rule": "amax_div", "fp8_eps": 8.0}),
    "fp8_decode_scale": ("fp8_tensor", None, {"fp8_decode_scale": 0.125}),
    "alignment": ("mxfp8", None, {"alignment": 512, "mx_scale": "even"}),
}  # fmt: skip


def same(ours: Any, theirs: nf.QuantizedTensor) -> bool:
    """All parts, to the bit."""
    factors = ours[2].numel() == 0 if theirs.global_scale is None else torch.equal(
        ours[2], theirs.global_scale)  # fmt: skip
    return torch.equal(ours[0], theirs.values) and torch.equal(ours[1], theirs.scales) and factors


@pytest.mark.parametrize("name", list(CASES))
def test_options_of_quantizers(name: str) -> None:
    """New results, given ones, numbers again; each option matters."""
    format, layout, options = CASES[name]
    wanted = nf.quantize(X, format, layout=layout, **options)
    plain = nf.quantize(X, format, layout=layout, batched=options.get("batched", False))
    assert not same((plain.values, plain.scales, plain.scales[:0]), wanted)
    parts = nft.quantize(X, format, layout, **options)
    assert same(parts, wanted)
    given = tuple(torch.zeros_like(part) for part in parts)
    assert nft.quantize(X, format, layout, out=given, **options) is given
    assert same(given, wanted)
    back = {key: options[key] for key in ("row_offsets", "batched", "alignment") if key in options}
    back["global_scale_axis"] = wanted.layout.global_scale_axis
    y = nft.dequantize(*parts, format, X.shape, layout, **back)
    assert torch.equal(y, wanted.dequantize())
    y.zero_()
    nft.dequantize(*parts, format, X.shape, layout, out=y, **back)
    assert torch.equal(y, wanted.dequantize())


def as_schema(options: dict[str, Any]) -> dict[str, Any]:
    """The options as the operator has them."""
    chosen = options.get("four_over_six")
    if isinstance(options.get("base_decode_scale"), torch.Tensor):
        return {"base_decode_scales": options["base_decode_scale"]}
    if chosen is None:
        return options
    return {**options, "four_over_six": f"{chosen.error} {chosen.error_math} {chosen.e4m3_max}"}


@on_each_device
@pytest.mark.parametrize("name", list(CASES))
def test_opcheck_of_quantizers(name: str, device: str) -> None:
    """Shape functions know the options that change shapes."""
    format, layout, options = CASES[name]
    arguments = (X.to(device), format, layout or "")
    torch.library.opcheck(OPS.quantize.default, arguments, moved(as_schema(options), device))


def test_refused_options() -> None:
    """The package's messages, and one for a text that only operators have."""
    with pytest.raises(ValueError, match="four_over_six"):
        OPS.quantize(X, "nvfp4", four_over_six="mae")
    with pytest.raises(ValueError, match="fp8_eps"):
        nft.quantize(X, "mxfp8", fp8_eps=1.0)
    with pytest.raises(ValueError, match="extra_scales"):
        nft.rmsnorm_quantize(X, X[0, 0].clone(), "nvfp4", extra_layout="linear")


def test_divisors() -> None:
    """Global scales as compressed-tensors stores them."""
    q = nf.quantize(X, "nvfp4", encode_scale=100.0)
    parts = (q.values, q.scales, 1 / q.global_scale)
    y = nft.dequantize(*parts, "nvfp4", X.shape, global_scale_divides=True)
    other = nf.QuantizedTensor(*parts, q.layout, q.shape)
    assert torch.equal(y, other.dequantize(global_scale_divides=True))


@pytest.mark.parametrize("is_sum", [False, True])
def test_more_outputs_of_norms(is_sum: bool) -> None:
    """The norm itself, and scales in a second layout; also in a compiled function."""
    weight = X[0, 1].clone()

    def call(module: Any, **how: Any) -> tuple[Any, ...]:
        normed, extra = torch.zeros_like(X), torch.zeros(16, 16, dtype=torch.uint8)
        sums = X.flip(0).contiguous()
        inputs = (X, sums, weight) if is_sum else (X, weight)
        function = module.add_rmsnorm_quantize if is_sum else module.rmsnorm_quantize
        parts = function(*inputs, "nvfp4", norm_output=normed, extra_layout="linear",
                         extra_scales=extra, four_over_six=nf.FourOverSix(), **how)  # fmt: skip
        return parts, normed, extra, sums

    wanted, *theirs = call(nf)
    assert theirs[0].any() and theirs[1].any()
    compiled = torch.compile(lambda: call(nft), fullgraph=True, backend="aot_eager")
    for run in (lambda: call(nft), lambda: call(nft, eps=1e-6), compiled):
        parts, *ours = run()
        assert same(parts, wanted)
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    out = tuple(torch.zeros_like(part) for part in parts)
    assert same(call(nft, out=out)[0], wanted)
    inputs = (X, X.clone(), weight, 1e-6, "nvfp4") if is_sum else (X, weight, 1e-6, "nvfp4")
    more = {"norm_output": ours[0], "extra_layout": "linear", "extra_scales": ours[1]}
    name = "add_rmsnorm_quantize" if is_sum else "rmsnorm_quantize"
    torch.library.opcheck(getattr(OPS, name).default, inputs, more)
    names = ("values", "scales", "global_scale")
    torch.library.opcheck(getattr(OPS, f"{name}_out").default, inputs,
                          {**more, **dict(zip(names, out, strict=True))})  # fmt: skip


LOGITS = torch.randn(9, 8, generator=torch.Generator().manual_seed(5))
IDS = LOGITS.topk(2).indices.int()
WEIGHTS = torch.rand(9, 2, generator=torch.Generator().manual_seed(6)).bfloat16()
PACKED = IDS << 16 | (WEIGHTS.view(torch.int16).int() & 0xFFFF)
HOLES = torch.where(torch.arange(18).reshape(9, 2) % 5 == 0, -1, IDS)
ROUTINGS: dict[str, dict[str, Any]] = {
    "weights_bf16": {"logits": LOGITS, "weights_bf16": True},
    "groups": {"logits": LOGITS, "method": "deepseek_v3", "n_group": 4, "topk_group": 2,
               "bias": torch.full((8,), 0.3), "grouped_bias_bf16": True, "routed_scale": 2.5},
    "norm_topk": {"logits": LOGITS, "method": "sigmoid_renorm", "norm_topk": False},
    "shared_experts": {"logits": LOGITS, "shared_experts": 1},
    "ids": {"ids": IDS, "weights": WEIGHTS, "experts": 8},
    "holes": {"ids": HOLES, "weights": WEIGHTS, "experts": 8, "negative_one_is_empty": True},
    "packed": {"packed": PACKED, "experts": 8},
}  # fmt: skip


@pytest.mark.parametrize("name", list(ROUTINGS))
def test_options_of_route(name: str) -> None:
    """From logits or given, with a replay."""
    options = dict(ROUTINGS[name])
    logits, method = options.pop("logits", None), options.pop("method", "renormalize")
    wanted = nf.route(logits, top_k=2, method=method, **options)
    got = nft.route(logits, 2, method, **options)
    if "shared_experts" not in options:  # They have no replay.
        theirs, ours = (torch.zeros(9, 2, dtype=torch.int16) for _ in range(2))
        nf.route(logits, top_k=2, method=method, replay=theirs, **options)
        options["replay"] = ours
        got = nft.route(logits, 2, method, **options)
        assert torch.equal(ours, theirs) and theirs.any()
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    out = tuple(torch.zeros_like(part) for part in got)
    assert nft.route(logits, 2, method, out=out, **options) is out
    assert all(torch.equal(a, b) for a, b in zip(out, wanted, strict=True))
    names = {"ids": "given_ids", "weights": "given_weights"}
    rest = {names.get(key, key): value for key, value in options.items()}
    first = (logits, rest.pop("bias", None), 2, method, rest.pop("n_group", 1),
             rest.pop("topk_group", 1), rest.pop("routed_scale", 1.0))  # fmt: skip
    torch.library.opcheck(OPS.route_out.default, (*first, *out), rest)
    rest.pop("replay", None)
    torch.library.opcheck(OPS.route.default, first, rest)


def test_route_needs_something() -> None:
    """Also where only shapes are computed."""
    with pytest.raises(ValueError, match="logits"):
        nft.route(None, 2)
    with pytest.raises(ValueError, match="experts"):
        nft.route(None, 2, ids=IDS, weights=WEIGHTS)


def layer_of(mode: str) -> nf.MoeLayer:
    """Eight experts, of random weights."""
    generator = torch.Generator().manual_seed(1)
    w1, w2 = (torch.randn(*shape, generator=generator).bfloat16() for shape in
              ((8, 256, 256), (8, 256, 128)))  # fmt: skip
    if mode != "bf16":
        w1, w2 = (nf.quantize(w, "nvfp4", layout="linear", batched=True) for w in (w1, w2))
    config = nf.MoeConfig(hidden=256, inter=128, experts=8, top_k=2, mode=mode,
                          negative_one_is_empty=True)  # fmt: skip
    return nf.MoeLayer.prepare(w1, w2, config)


def row_cases(mode: str) -> dict[str, Any]:
    """Rows as they are, or coded for the mode."""
    rows = X.reshape(16, 256)[:9]
    if mode == "bf16":
        return {"hidden": rows}
    coded = nf.quantize(rows, mode, layout="linear")
    return {"hidden": coded.values, "hidden_scales": coded.scales, "row_scale": coded.global_scale}


@pytest.mark.parametrize("mode", ["bf16", "nvfp4_per_token"])
@pytest.mark.parametrize("routing", ["ids", "packed", "logits"])
def test_options_of_layers(mode: str, routing: str) -> None:
    """Given routings, quantized rows, all outputs; compiled, too."""
    layer = layer_of(mode)
    module = nft.Moe(layer)
    how = {"ids": {"ids": HOLES, "weights": WEIGHTS}, "packed": {"packed": PACKED},
           "logits": {"logits": LOGITS}}[routing]  # fmt: skip
    rows = row_cases(mode)
    hidden, how = rows.pop("hidden"), {**how, **rows}

    def outputs() -> dict[str, torch.Tensor]:
        return {"slot_out": torch.zeros(layer.max_rows(9), 256, dtype=torch.bfloat16),
                "expert_weights": torch.zeros(9, 2),
                "slot_to_row": torch.zeros(18, dtype=torch.int32),
                "topk_ids": torch.zeros(9, 2, dtype=torch.int32),
                "routing_replay": torch.zeros(9, 2, dtype=torch.int16)}  # fmt: skip

    theirs = outputs()
    wanted = torch.zeros(9, 256, dtype=torch.bfloat16)
    layer.run(hidden, out=wanted, **how, **theirs)
    assert wanted.any() and all(value.any() for value in theirs.values())
    assert torch.equal(module(hidden, **how), wanted)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for call in (module, compiled):
        ours = outputs()
        assert torch.equal(call(hidden, **how, **ours), wanted)
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    out, ours = torch.zeros_like(wanted), outputs()
    space = layer.new_workspace(9)
    assert module(hidden, **how, **ours, out=out, workspace=space) is out
    assert torch.equal(out, wanted) and torch.equal(ours["slot_to_row"], theirs["slot_to_row"])
    logits = how.pop("logits", None)
    first = (hidden, logits, None, module._handle.number)
    torch.library.opcheck(OPS.moe.default, (*first, 256, torch.bfloat16), how)
    room = torch.empty(256 + layer.required_workspace(9), dtype=torch.uint8)
    torch.library.opcheck(OPS.moe_out.default, (*first, out, room), how)
    torch.library.opcheck(OPS.moe_out.default, (*first, out, None), {**how, **outputs()})
