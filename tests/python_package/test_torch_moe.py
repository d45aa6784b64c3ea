"""FlashInfer's Mixture-of-Experts functions against a layer written with torch alone.

All routing methods, all formats, given routings; on the CPU, and on a GPU where there is one.
"""

from __future__ import annotations

from typing import Any

import pytest

import narrowfloat as nf
import narrowfloat.compat.flashinfer as fi

torch = pytest.importorskip("torch", reason="torch is not installed; ./test.sh --with-torch")

import torch_formulas as formulas  # noqa: E402
import torch_moe as moe  # noqa: E402

T, H, I, E, K = 9, 256, 128, 8, 3
# Largest distance of a run (moe spec 12.3, G4).
FAR = {"bf16": 3e-3, "fp8_tensor": 2e-2, "fp8_block": 2e-2, "mxfp8": 5e-3, "mxfp4_mxfp8": 5e-3,
       "mxfp4_bf16": 3e-3, "nvfp4": 1.5e-2, "nvfp4_per_token": 3e-2}  # fmt: skip
KINDS = {"swiglu": 3, "oai": 3, "geglu_tanh": 4, "relu2": 6, "swiglu_step": 7, "identity": 9,
         "situ": 10, "silu": 2}  # fmt: skip
HAS_GPU = torch.cuda.is_available() and nf.build_info()["cuda_enabled"]


@pytest.fixture(params=["cpu", "cuda"] if HAS_GPU else ["cpu"])
def device(request: pytest.FixtureRequest) -> str:
    """Where the tensors lie."""
    return request.param


def stacked(parts: list[torch.Tensor]) -> torch.Tensor:
    """One tensor of all experts; float8 has no stack()."""
    if parts[0].dtype == torch.float8_e4m3fn:
        return torch.stack([part.view(torch.uint8) for part in parts]).view(parts[0].dtype)
    return torch.stack(parts)


class Case:
    """A layer, its inputs, and the arguments that all entry points share."""

    def __init__(self, mode: str, device: str, activation: str = "swiglu", inter: int = I) -> None:
        self.mode, self.device, self.kind = mode, device, KINDS.get(activation, 4)
        self.layer = moe.make(mode, activation, E, H, inter)
        generator = torch.Generator().manual_seed(5)
        self.logits = torch.randn(T, E, generator=generator)
        self.bias = torch.linspace(-0.3, 0.3, E)
        plain = torch.randn(T, H, generator=generator).bfloat16()
        self.x = moe.FORMATS[mode][1](plain)
        self.plain = plain
        self.router = moe.Router(1, K)

    def to(self, tensor: torch.Tensor | None) -> torch.Tensor | None:
        """On the device."""
        return None if tensor is None else tensor.to(self.device)

    def sizes(self, **changes: Any) -> dict[str, Any]:
        """Keywords of the trtllm functions."""
        router = self.router
        return {"num_experts": E, "top_k": router.top_k, "n_group": router.n_group,
                "topk_group": router.topk_group, "intermediate_size": I, "local_expert_offset": 0,
                "local_num_experts": E, "routed_scaling_factor": router.scale,
                "routing_method_type": router.method, "activation_type": self.kind,
                **changes}  # fmt: skip

    def weights(self, which: int, block: int = 32, interleave: bool = True) -> torch.Tensor:
        """Codes in the order of prepared rows; block 0: canonical."""
        codes = stacked([w.codes for w in (self.layer.w1, self.layer.w2)[which]])
        if not block:
            return self.to(codes)
        gated = which == 0 and self.layer.is_gated and interleave
        return self.to(codes[:, moe.row_order(codes.shape[1], gated, block)].contiguous())

    def scales(self, which: int) -> torch.Tensor:
        """Shuffled, then in layout 128x4, in the shape of the linear ones."""
        linear = stacked([w.scales for w in (self.layer.w1, self.layer.w2)[which]])
        order = moe.row_order(linear.shape[1], which == 0 and self.layer.is_gated)
        packed = [formulas.swizzled(part[order]) for part in linear]
        return self.to(torch.stack(packed).reshape(linear.shape))

    def factors(self, which: int) -> torch.Tensor:
        """The weights of all experts."""
        return torch.stack([w.factor.reshape(()) for w in (self.layer.w1, self.layer.w2)[which]])

    def scalars(self) -> tuple[torch.Tensor, ...]:
        """output1_scale_scalar, the gate's, output2_scale_scalar."""
        dynamic = self.mode == "nvfp4_per_token"
        gate = self.factors(0) if dynamic else self.factors(0) * self.x.factor
        m = self.layer.multiplier
        both = self.layer.is_gated and self.kind != 10
        folded = gate * m if both else torch.full((E,), float(m))
        return self.to(folded), self.to(gate), self.to(self.factors(1) / m)

    def routed(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and weights."""
        return moe.route(self.logits, self.router)

    def given(self, form: str) -> Any:
        """The same as an argument of the routed functions."""
        ids, weights = self.routed()
        if form == "packed":
            return self.to(moe.pack(ids, weights))
        return self.to(ids.int()), self.to(weights)

    def check(self, got: Any, wanted: torch.Tensor | None = None, **options: Any) -> None:
        """Frobenius distance from the reference."""
        if wanted is None:
            wanted = self.layer.run(self.x, *self.routed(), **options)
        out = got[0] if isinstance(got, list) else got
        assert out.device.type == self.device and out.dtype == torch.bfloat16
        distance = float((out.cpu().double() - wanted).norm() / wanted.norm())
        assert distance < FAR[self.mode], distance


def fp4(case: Case, given: str | None = None, **changes: Any) -> Any:
    """The FP4 function, from logits or of a given routing."""
    folded, gate, output2 = case.scalars()
    needs_scalars = case.mode.startswith("nvfp4")
    rows, scales = case.x.codes, case.x.scales
    arguments = {
        "routing_bias": case.to(case.bias), "hidden_states": case.to(rows),
        "hidden_states_scale": None if scales is None else case.to(scales).view(
            torch.float8_e4m3fn),
        "gemm1_weights": case.weights(0),
        "gemm1_weights_scale": case.scales(0).view(torch.float8_e4m3fn),
        "gemm1_bias": None, "gemm1_alpha": None, "gemm1_beta": None, "gemm1_clamp_limit": None,
        "gemm2_weights": case.weights(1),
        "gemm2_weights_scale": case.scales(1).view(torch.float8_e4m3fn), "gemm2_bias": None,
        "output1_scale_scalar": folded if needs_scalars else None,
        "output1_scale_gate_scalar": gate if needs_scalars else None,
        "output2_scale_scalar": output2 if needs_scalars else None, **case.sizes(), **changes,
    }  # fmt: skip
    if case.mode == "nvfp4_per_token":
        arguments["per_token_scale"] = case.to(case.x.factor)
    if given is None:
        return fi.trtllm_fp4_block_scale_moe(case.to(case.logits), **arguments)
    return fi.trtllm_fp4_block_scale_routed_moe(case.given(given), **arguments)


def bf16(case: Case, **changes: Any) -> Any:
    """The bfloat16 function."""
    return fi.trtllm_bf16_moe(
        case.to(case.logits), case.to(case.bias), case.to(case.plain),
        moe.block_major(case.weights(0)), moe.block_major(case.weights(1)), **case.sizes(),
        **changes,
    )  # fmt: skip


ROUTERS = [moe.Router(method, 1 if method == 3 else K) for method in (0, 1, 3, 4, 5, 6, 8, 9)]
ROUTERS += [moe.Router(6, K, norm=False), moe.Router(7, K, scale=2.5), moe.Router(2, K, scale=2.5),
            moe.Router(2, K, n_group=4, topk_group=2, scale=1.5)]  # fmt: skip


@pytest.mark.parametrize("router", ROUTERS, ids=lambda r: f"{r.method}-{r.n_group}-{r.norm}")
@pytest.mark.parametrize("mode", ["bf16", "nvfp4"])
def test_every_routing_method(mode: str, router: moe.Router, device: str) -> None:
    """From logits, through a layer; ids alone through trtllm_gen_routing()."""
    case = Case(mode, device)
    case.router = router
    if router.method in (2, 7):
        router.bias = case.bias
    run = bf16 if mode == "bf16" else fp4
    case.check(run(case, norm_topk_prob=router.norm))
    found = fi.trtllm_gen_routing(
        case.to(case.logits), case.to(case.bias), router.method, router.top_k,
        n_group=router.n_group, topk_group=router.topk_group, norm_topk_prob=router.norm,
        routed_scaling_factor=router.scale,
    )  # fmt: skip
    ids, weights = case.routed()
    assert torch.equal(found.topk_ids.cpu().long(), ids)
    assert torch.allclose(found.topk_weights.cpu().float(), weights, rtol=2**-7)


@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
@pytest.mark.parametrize("mode", ["nvfp4", "nvfp4_per_token", "mxfp4_mxfp8", "mxfp4_bf16"])
def test_fp4(mode: str, activation: str, device: str) -> None:
    """All formats of rows and weights; routings from logits and given ones."""
    case = Case(mode, device, activation)
    for given in (None, "packed", "ids"):
        case.check(fp4(case, given))


@pytest.mark.parametrize("activation", ["geglu_tanh", "situ", "silu", "identity", "swiglu_step"])
def test_fp4_activations(activation: str, device: str) -> None:
    """Those that the specification lists for the compatible enumeration."""
    case = Case("nvfp4", device, activation)
    case.check(fp4(case))


def test_bf16_with_parameters(device: str) -> None:
    """alpha, beta, limit in real units; a shard; the pieces."""
    case = Case("bf16", device, "oai")
    parameters = {name: torch.full((E,), value, device=device)
                  for name, value in (("gemm1_alpha", 1.702), ("gemm1_beta", 1.0),
                                      ("gemm1_clamp_limit", 0.9))}  # fmt: skip
    case.check(bf16(case, **parameters))
    case = Case("bf16", device)
    sizes = case.sizes(local_expert_offset=2, local_num_experts=4)
    got = fi.trtllm_bf16_moe(
        case.to(case.logits), None, case.to(case.plain),
        moe.block_major(case.weights(0)[2:6]), moe.block_major(case.weights(1)[2:6]), **sizes,
    )  # fmt: skip
    case.check(got, local=range(2, 6))
    rows, weights, places = bf16(case, do_finalize=False)
    assert places.shape == (T * K,) and weights.dtype == torch.bfloat16
    picked = rows.double()[places.long()].reshape(T, K, H)
    case.check((picked * weights.double()[..., None]).sum(1).bfloat16())


@pytest.mark.parametrize("activation", ["swiglu", "geglu_tanh", "relu2", "swiglu_step"])
def test_fp8_per_tensor(activation: str, device: str) -> None:
    """Renormalize, and Llama4 with its weight on the rows."""
    case = Case("fp8_tensor", device, activation)
    folded, gate, output2 = case.scalars()
    arguments = (case.to(case.bias), case.to(case.x.codes), case.weights(0), folded, gate,
                 case.weights(1), output2)  # fmt: skip
    for router in (moe.Router(1, K), moe.Router(3, 1)):
        case.router, on_input = router, router.method == 3
        got = fi.trtllm_fp8_per_tensor_scale_moe(
            case.to(case.logits), *arguments, **case.sizes(), use_routing_scales_on_input=on_input
        )
        case.check(got, weight_on_input=on_input)


def test_fp8_block(device: str) -> None:
    """DeepSeek's routing and scales, weights as they are and shuffled."""
    case = Case("fp8_block", device)
    case.router = moe.Router(2, K, case.bias, 4, 2, 2.5)
    s1, s2 = (case.to(stacked([w.scales for w in side])) for side in (case.layer.w1, case.layer.w2))
    for block in (0, 16):
        got = fi.trtllm_fp8_block_scale_moe(
            case.to(case.logits), case.to(case.bias), case.to(case.x.codes),
            case.to(case.x.scales.T.contiguous()), case.weights(0, block, False), s1,
            case.weights(1, block), s2, **case.sizes(), use_shuffled_weight=bool(block),
        )  # fmt: skip
        case.check(got)


def test_mxfp8(device: str) -> None:
    """The same function, scales that are powers of two."""
    case = Case("mxfp8", device)
    got = fi.trtllm_fp8_block_scale_moe(
        case.to(case.logits), None, case.to(case.x.codes), case.to(case.x.scales),
        case.weights(0), case.scales(0), case.weights(1), case.scales(1), **case.sizes(),
        fp8_quantization_type=fi.Fp8QuantizationType.MxFp8, use_shuffled_weight=True,
    )  # fmt: skip
    case.check(got)


def swizzled_scales(parts: list[moe.Coded]) -> torch.Tensor:
    """Scales in layout 128x4, four per int32; both halves of the first GEMM in one image."""
    made = [formulas.swizzled(part.scales) for part in parts]
    blocks = -(-parts[0].scales.shape[1] // 4)
    return torch.stack(made).view(torch.int32).reshape(len(parts), -1, blocks)


@pytest.mark.parametrize("mode", ["bf16", "fp8_tensor", "fp8_block", "nvfp4", "mxfp4_mxfp8",
                                  "mxfp8"])  # fmt: skip
def test_cutlass(mode: str, device: str) -> None:
    """Canonical rows, given routings, every format; GeGLU there is of erf. Halves of odd sizes."""
    plans = [("swiglu", I), ("geglu_erf", I), ("relu2", I)]
    if mode != "fp8_block":
        plans.append(("swiglu", 192))
    for activation, inter in plans:
        case = Case(mode, device, activation, inter)
        w1, w2 = case.weights(0, 0), case.weights(1, 0)
        rows, options, scales = case.x.codes, {}, []
        first, second = case.factors(0) * case.x.factor, case.factors(1) / case.layer.multiplier
        m = case.layer.multiplier.reshape(1)
        if mode == "fp8_tensor":
            scales = [first, m, second, torch.ones(1)]
        elif mode == "fp8_block":
            rows = case.plain
            scales = [stacked([w.scales for w in s]) for s in (case.layer.w1, case.layer.w2)]
            options = {"use_deepseek_fp8_block_scale": True}
        elif mode == "nvfp4":
            rows = case.plain
            scales = [1 / case.x.factor.reshape(1), swizzled_scales(case.layer.w1), first,
                      m, swizzled_scales(case.layer.w2), second]  # fmt: skip
        elif mode != "bf16":
            scales = [swizzled_scales(case.layer.w1), first,
                      swizzled_scales(case.layer.w2), second]  # fmt: skip
            options = {"use_mxfp8_act_scaling": True, "input_sf": case.to(case.x.scales),
                       "swizzled_input_sf": False}  # fmt: skip
        if "4" in mode:
            w1, w2 = w1.view(torch.int64), w2.view(torch.int64)
        ids, weights = case.given("ids")
        (got,) = fi.cutlass_fused_moe(
            case.to(rows), ids, weights, w1, w2, torch.bfloat16, [case.to(s) for s in scales],
            activation_type=case.kind, **options,
        )  # fmt: skip
        case.check(got)
