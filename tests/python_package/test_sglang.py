"""The plug-in for SGLang against SGLang's own classes: loading, packing and running experts.

Experts of random checkpoints are loaded by SGLang's FusedMoE on the CPU and judged by dequantized
weights in fp64. Skipped without SGLang (./test.sh --with-engines).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from engine_cases import (
    CASES,
    EXPERTS,
    HIDDEN,
    INTER,
    TOKENS,
    TOP_K,
    Case,
    compressed,
    distance,
    gpt_oss,
    matrices_of_experts,
    reference,
    routing,
)

torch = pytest.importorskip("torch", reason="torch is not installed; ./test.sh --with-engines")
pytest.importorskip("sglang", reason="sglang is not installed; ./test.sh --with-engines")

from sglang.srt import plugins  # noqa: E402
from sglang.srt.arg_groups import choices  # noqa: E402
from sglang.srt.layers import quantization  # noqa: E402
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE  # noqa: E402
from sglang.srt.layers.moe.token_dispatcher import standard  # noqa: E402
from sglang.srt.layers.moe.topk import StandardTopKOutput  # noqa: E402
from sglang.srt.layers.moe.utils import MoeRunnerBackend  # noqa: E402
from sglang.srt.runtime_context import get_context, get_flags, get_parallel  # noqa: E402


@pytest.fixture(autouse=True, scope="module")
def engine() -> Iterator[None]:
    """Loads plug-ins as SGLang does, and makes what its layers ask for: arguments and ranks."""
    plugins.load_plugins()
    ranks = {"tp_size": 1, "moe_ep_size": 1, "moe_ep_rank": 0, "moe_tp_size": 1, "moe_tp_rank": 0,
             "tp_group": None}  # fmt: skip
    with get_context().override_server_args(device="cpu"), get_parallel().override(**ranks):
        yield


def experts_of(declared: dict[str, Any], **options: Any) -> Any:
    """SGLang's layer of experts with the configuration that --quantization narrowfloat gives."""
    config = quantization.QUANTIZATION_METHODS["narrowfloat"].from_config(dict(declared))
    given: dict[str, Any] = {
        "num_experts": EXPERTS, "hidden_size": HIDDEN, "intermediate_size": INTER, "layer_id": 0,
        "top_k": TOP_K, "params_dtype": torch.bfloat16, "quant_config": config,
        "prefix": "model.layers.0.mlp.experts", **options,
    }  # fmt: skip
    return FusedMoE(**given)


def load(layer: Any, case: Case) -> list[dict[str, Any]]:
    """Fills a layer through SGLang's loaders as its models do; the matrices of all experts."""
    found = []
    for expert, (tensors, matrices) in enumerate(matrices_of_experts(case)):
        for (shard, name), tensor in tensors.items():
            full = f"{'w2' if shard == 'w2' else 'w13'}_{name}"
            if case.format == "mxfp4":  # SGLang's models give the packed ones this name.
                full = full.removesuffix("_packed")
            parameter = getattr(layer, full)
            parameter.weight_loader(parameter, tensor, full, shard, expert)
        found.append(matrices)
    return found


def run(layer: Any, x: Any, ids: Any, weights: Any) -> Any:
    """The layer's output for a routing that the model made."""
    return layer(x, StandardTopKOutput(weights, ids, torch.empty(0)))


def test_sglang_finds_the_entry_point_and_has_our_choices() -> None:
    assert "narrowfloat" in plugins.load_plugins_by_group("sglang.srt.plugins")
    assert choices.QUANTIZATION_CHOICES.count("narrowfloat") == 1
    assert choices.MOE_RUNNER_BACKEND_CHOICES.count("narrowfloat") == 1


@pytest.mark.parametrize("name", CASES)
def test_experts_of_each_convention_are_loaded_packed_and_run(name: str) -> None:
    case = CASES[name]
    layer = experts_of(case.declared)
    matrices = load(layer, case)
    layer.quant_method.process_weights_after_loading(layer)
    assert not list(layer.parameters())  # No second copy.
    x, ids, weights = routing()
    out = run(layer, x, ids, weights)
    assert out.dtype == x.dtype
    assert distance(out, reference(matrices, x, ids, weights)) < case.tolerance


def test_two_ranks_of_expert_parallelism_sum_to_the_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(standard, "get_device", lambda: "cpu")  # SGLang's asks for a GPU.
    case, (x, ids, weights) = CASES["nvfp4-modelopt"], routing()
    ids[0] = torch.tensor([-1, 4, 2])  # -1 is padding.
    for rank in range(2):
        here = range(3 * rank, 3 * rank + 3)
        with get_parallel().override(tp_size=2, attn_tp_size=2, moe_ep_size=2, moe_ep_rank=rank):
            layer = experts_of(case.declared)
            matrices = load(layer, case)
            layer.quant_method.process_weights_after_loading(layer)
            out = run(layer, x, ids.long(), weights)
        assert distance(out, reference(matrices, x, ids, weights, here)) < case.tolerance
        absent = [t for t in range(TOKENS) if not set(ids[t].tolist()) & set(here)]
        assert all(bool((out[t] == 0).all()) for t in absent)


def test_gpt_oss_has_interleaved_rows_and_biases() -> None:
    layer = experts_of({"quant_method": "mxfp4"}, with_bias=True, gemm1_alpha=1.702,
                       gemm1_clamp_limit=7.0)  # fmt: skip
    tensors, wanted = gpt_oss()
    for (stem, name), tensor in tensors.items():
        full = f"{stem}_{'weight_bias' if name == 'bias' else name}"
        parameter = getattr(layer, full)
        parameter.weight_loader(parameter, tensor, weight_name=full, shard_id=None, expert_id=None)
    layer.quant_method.process_weights_after_loading(layer)
    x, ids, weights = routing()
    assert distance(run(layer, x, ids, weights), wanted(x, ids, weights)) < 0.01


def test_experts_of_deepseek_v4_are_mxfp4_beside_fp8() -> None:
    case, (x, ids, weights) = CASES["mxfp4"], routing()
    config = quantization.QUANTIZATION_METHODS["narrowfloat"].from_config(
        dict(CASES["fp8-block"].declared)
    )
    config.is_fp4_experts = True  # SGLang's model loader does so.
    layer = experts_of(CASES["fp8-block"].declared, quant_config=config, swiglu_limit=0.5)
    found = []
    for expert, (tensors, matrices) in enumerate(matrices_of_experts(case)):
        for (shard, name), tensor in tensors.items():
            stem = "w2" if shard == "w2" else "w13"
            is_scale = name == "weight_scale"
            full = f"{stem}_weight_scale_inv" if is_scale else f"{stem}_weight"
            given = tensor.view(torch.float8_e8m0fnu if is_scale else torch.int8)
            parameter = getattr(layer, full)
            parameter.weight_loader(parameter, given, full, shard, expert)
        found.append(matrices)
    layer.quant_method.process_weights_after_loading(layer)
    out = run(layer, x, ids, weights)
    assert distance(out, reference(found, x, ids, weights)) > 0.1
    assert distance(out, reference(found, x, ids, weights, limit=0.5)) < case.tolerance


def test_activation_scales_of_nvfp4_are_loaded_and_not_used() -> None:
    case, (x, ids, weights) = CASES["nvfp4-ct"], routing()
    declared = compressed("nvfp4-pack-quantized", 4, "float", "tensor_group", group_size=16)
    group = declared["config_groups"]["group_0"]
    group["input_activations"] = {**group["weights"], "dynamic": "local"}
    layer = experts_of(declared)
    matrices = load(layer, case)
    for stem, shard in (("w13", "w1"), ("w13", "w3"), ("w2", "w2")):
        full = f"{stem}_input_global_scale"
        parameter = getattr(layer, full)
        parameter.weight_loader(parameter, torch.tensor(3.0), full, shard, 0)
    layer.quant_method.process_weights_after_loading(layer)
    assert not list(layer.parameters())
    out = run(layer, x, ids, weights)
    assert distance(out, reference(matrices, x, ids, weights)) < case.tolerance


@pytest.mark.parametrize("name", ["nvfp4-modelopt", "mxfp4"])
def test_the_factor_of_routed_experts_is_applied_once(name: str) -> None:
    case, (x, ids, weights) = CASES[name], routing()
    layer = experts_of(case.declared, routed_scaling_factor=2.5)
    matrices = load(layer, case)
    layer.quant_method.process_weights_after_loading(layer)
    # SGLang's TopK applies it to the weights where the layer says so.
    given = weights * 2.5 if layer.should_fuse_routed_scaling_factor_in_topk else weights
    wanted = reference(matrices, x, ids, weights * 2.5)
    assert distance(run(layer, x, ids, given), wanted) < case.tolerance


def test_experts_that_a_checkpoint_leaves_plain_stay_with_sglang() -> None:
    declared = {**CASES["mxfp4-ct"].declared, "ignore": [r"re:.*\.experts\..*"]}
    layer = experts_of(declared)
    assert type(layer.quant_method).__name__ == "UnquantizedFusedMoEMethod"


@pytest.mark.parametrize(("options", "reason"), [
    ({"no_combine": True}, "no_combine"),
    ({"is_gated": False}, "without a gate"),
])  # fmt: skip
def test_what_is_not_served_is_refused_with_the_reason(options: Any, reason: str) -> None:
    with pytest.raises(NotImplementedError, match=reason):
        experts_of(CASES["mxfp4"].declared, **options)


def test_a_runner_of_sglang_beside_ours_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(get_flags().moe, "runner_backend", MoeRunnerBackend.MARLIN)
    with pytest.raises(NotImplementedError, match="--moe-runner-backend marlin"):
        experts_of(CASES["nvfp4-ct"].declared)


def test_an_activation_that_is_not_served_is_named() -> None:
    case = CASES["mxfp4"]
    layer = experts_of(case.declared, activation="situ")
    load(layer, case)
    with pytest.raises(NotImplementedError, match="activation: .*got situ"):
        layer.quant_method.process_weights_after_loading(layer)
    assert list(layer.parameters())  # Nothing is lost.


@pytest.mark.parametrize(("declared", "reason"), [
    ({"quant_method": "fp8", "activation_scheme": "static"}, "weight_block_size"),
    ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "MIXED_PRECISION"),
    (compressed("pack-quantized", 4, "int", "group", group_size=128), "got int of 4 bits"),
])  # fmt: skip
def test_checkpoints_that_are_not_read_are_refused(declared: Any, reason: str) -> None:
    with pytest.raises(NotImplementedError, match=reason):
        quantization.QUANTIZATION_METHODS["narrowfloat"].from_config(declared)


def test_a_checkpoint_is_claimed_by_name_or_by_the_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def claimed(declared: dict[str, Any], asked: str | None) -> str | None:
        """The first method that claims it, as SGLang's ModelConfig asks for one."""
        names = (method.override_quantization_method(declared, asked)
                 for method in quantization.QUANTIZATION_METHODS.values())  # fmt: skip
        return next((name for name in names if name), None)

    nvfp4 = {"quant_method": "modelopt_fp4", "quant_algo": "NVFP4"}
    monkeypatch.delenv("NARROWFLOAT_SGLANG", raising=False)
    assert claimed(nvfp4, None) == "modelopt_fp4"
    assert claimed(nvfp4, "narrowfloat") == "narrowfloat"
    monkeypatch.setenv("NARROWFLOAT_SGLANG", "1")
    assert claimed(nvfp4, None) == "narrowfloat"
    assert claimed(CASES["fp8-block"].declared, "fp8") is None
    assert claimed({"quant_method": "gptq"}, None) is None
    monkeypatch.setenv("NARROWFLOAT_SGLANG", "yes")
    with pytest.raises(ValueError, match="NARROWFLOAT_SGLANG: expected 0 or 1, got 'yes'"):
        claimed(nvfp4, None)
