"""The plug-in for vLLM against vLLM's own classes: loading, packing and running experts on the CPU.

Experts of random checkpoints are loaded by vLLM's RoutedExperts and judged by dequantized weights
in fp64. Skipped without vLLM (./test.sh --with-engines).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

import narrowfloat as nf

torch = pytest.importorskip("torch", reason="torch is not installed; ./test.sh --with-engines")
pytest.importorskip("vllm", reason="vllm is not installed; ./test.sh --with-engines")

from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config  # noqa: E402
from vllm.distributed import parallel_state  # noqa: E402
from vllm.model_executor.layers import quantization  # noqa: E402
from vllm.model_executor.layers.fused_moe import config as moe_configs  # noqa: E402
from vllm.model_executor.layers.fused_moe.activation import MoEActivation  # noqa: E402
from vllm.model_executor.layers.fused_moe.expert_map_manager import (  # noqa: E402
    ExpertMapManager,
)
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts  # noqa: E402
from vllm.plugins import load_plugins_by_group  # noqa: E402

EXPERTS, HIDDEN, INTER, TOP_K, TOKENS = 6, 256, 128, 3, 9


def _compressed(format: str, bits: int, kind: str, strategy: str, **more: Any) -> dict[str, Any]:
    """A declaration of compressed-tensors for all Linear weights."""
    weights = {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True,
               "dynamic": False, **more}  # fmt: skip
    return {"quant_method": "compressed-tensors", "format": format, "ignore": [],
            "config_groups": {"group_0": {
                "targets": ["Linear"], "weights": weights, "input_activations": None,
                "format": format}}}  # fmt: skip


FP8_ROWS = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 128,
            "symmetric": True, "dynamic": True}  # fmt: skip
FP8_CT = _compressed("float-quantized", 8, "float", "block", block_structure=[128, 128])
FP8_CT["config_groups"]["group_0"]["input_activations"] = FP8_ROWS


@dataclass(frozen=True)
class Case:
    """A convention: its declaration, and the names that its tensors have in an expert."""

    declared: dict[str, Any]
    format: str
    values: str
    scales: str
    global_scale: str | None = None
    divides: bool = False
    tolerance: float = 0.01


CASES = {
    "nvfp4-modelopt": Case({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": []},
                           "nvfp4", "weight", "weight_scale", "weight_scale_2"),
    "nvfp4-ct": Case(_compressed("nvfp4-pack-quantized", 4, "float", "tensor_group", group_size=16),
                     "nvfp4", "weight_packed", "weight_scale", "weight_global_scale", divides=True),
    "mxfp4": Case({"quant_method": "mxfp4"}, "mxfp4", "weight", "weight_scale"),
    "mxfp4-ct": Case(_compressed("mxfp4-pack-quantized", 4, "float", "group", group_size=32,
                                 scale_dtype="torch.uint8"),
                     "mxfp4", "weight_packed", "weight_scale"),
    "fp8-block": Case({"quant_method": "fp8", "activation_scheme": "dynamic",
                       "weight_block_size": [128, 128]},
                      "fp8_128x128", "weight", "weight_scale_inv", tolerance=0.06),
    "fp8-block-ct": Case(FP8_CT, "fp8_128x128", "weight", "weight_scale", tolerance=0.06),
}  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Makes what vLLM's layers ask for: an engine's configuration, and process groups of one."""
    from narrowfloat.vllm import register

    register()
    store = tmp_path_factory.mktemp("store") / "groups"
    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig(device="cpu"))):
        parallel_state.init_distributed_environment(1, 0, f"file://{store}", 0, backend="gloo")
        parallel_state.initialize_model_parallel()
        yield
        parallel_state.cleanup_dist_env_and_memory()


def moe_config(**changes: Any) -> Any:
    """vLLM's description of a layer, of one rank or of two."""
    parallel = moe_configs.FusedMoEParallelConfig.make_no_parallel()
    for name in ("ep_size", "ep_rank", "use_ep", "enable_eplb", "dp_size"):
        if name in changes:
            setattr(parallel, name, changes.pop(name))
    given: dict[str, Any] = {
        "num_experts": EXPERTS, "experts_per_token": TOP_K, "hidden_dim": HIDDEN,
        "intermediate_size": INTER, "num_local_experts": EXPERTS // parallel.ep_size,
        "num_logical_experts": EXPERTS, "activation": MoEActivation.SILU, "device": "cpu",
        "routing_method": moe_configs.RoutingMethodType.Renormalize,
        "moe_parallel_config": parallel, "in_dtype": torch.bfloat16, **changes,
    }  # fmt: skip
    return moe_configs.FusedMoEConfig(**given)


def experts_of(declared: dict[str, Any], moe: Any, **options: Any) -> Any:
    """vLLM's layer of experts with the configuration that --quantization narrowfloat gives."""
    config = quantization.get_quantization_config("narrowfloat").from_config(declared)
    manager = ExpertMapManager(64, TOP_K, EXPERTS, 0, 2, moe.moe_parallel_config,
                               options.pop("placement", "linear"), False)  # fmt: skip
    return RoutedExperts("model.layers.0.mlp.experts", torch.bfloat16, moe, config, manager,
                         **options)  # fmt: skip


def quantized(case: Case, weight: torch.Tensor, factor: float) -> tuple[dict[str, Any], Any]:
    """Tensors of one matrix by their names in a checkpoint, and the matrix that they stand for."""
    if case.global_scale is None:
        whole = nf.quantize(weight, case.format, layout="linear")
    else:
        scale = 448 * 6 / (float(weight.abs().max()) * factor)
        whole = nf.quantize(weight, case.format, layout="linear", encode_scale=scale)
    scales = whole.scales
    if case.format == "nvfp4":
        scales = scales.view(torch.float8_e4m3fn)
    values = whole.values
    if case.format.startswith("fp8"):
        values = values.view(torch.float8_e4m3fn)
    tensors = {case.values: values, case.scales: scales}
    if case.global_scale is not None:
        scale = whole.global_scale
        tensors[case.global_scale] = 1 / scale if case.divides else scale
    return tensors, nf.dequantize(whole).double()


def load(layer: Any, case: Case) -> list[dict[str, torch.Tensor]]:
    """Fills a layer through vLLM's loaders as its models do; the matrices of all experts.

    Gate and up of an expert differ in size by 8, and so in their global scales.
    """
    generator = torch.Generator().manual_seed(7)
    parameters = dict(layer.named_parameters())
    sizes = {"w1": (INTER, HIDDEN, 8.0), "w3": (INTER, HIDDEN, 1.0), "w2": (HIDDEN, INTER, 1.0)}
    found = []
    for expert in range(EXPERTS):
        matrices = {}
        for shard, (rows, cols, size) in sizes.items():
            weight = torch.randn(rows, cols, generator=generator) * size * cols**-0.5
            tensors, matrices[shard] = quantized(case, weight.bfloat16(), 1.0 + expert)
            stem = "w2" if shard == "w2" else "w13"
            for name, tensor in tensors.items():
                full = f"{stem}_{name}"
                parameter = parameters[full]
                parameter.weight_loader(parameter, tensor, full, shard, expert,
                                        return_success=True)  # fmt: skip
        found.append(matrices)
    return found


def reference(matrices: Any, x: Any, ids: Any, weights: Any, here: Any = range(EXPERTS)) -> Any:
    """The sum over the slots of experts that are here, fp64."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token, slot in ((t, s) for t in range(ids.shape[0]) for s in range(ids.shape[1])):
        expert = int(ids[token, slot])
        if expert not in here:
            continue
        one, row = matrices[expert], x[token].double()
        gate, up = one["w1"] @ row, one["w3"] @ row
        out[token] += weights[token, slot].double() * (
            one["w2"] @ (torch.nn.functional.silu(gate) * up)
        )
    return out


def routing() -> tuple[Any, Any, Any]:
    """Rows, ids and weights."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(TOKENS, HIDDEN, generator=generator).bfloat16()
    ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOP_K]
                       for _ in range(TOKENS)])  # fmt: skip
    return x, ids.int(), torch.rand(TOKENS, TOP_K, generator=generator)


def distance(result: torch.Tensor, wanted: torch.Tensor) -> float:
    """The distance as a part of the norm."""
    return float((result.double() - wanted).norm() / wanted.norm())


def test_vllm_finds_the_entry_point() -> None:
    assert "narrowfloat" in load_plugins_by_group("vllm.general_plugins")


@pytest.mark.parametrize("name", CASES)
def test_experts_of_each_convention_are_loaded_packed_and_run(name: str) -> None:
    case = CASES[name]
    layer = experts_of(case.declared, moe_config())
    matrices = load(layer, case)
    layer.quant_method.process_weights_after_loading(layer)
    assert not list(layer.parameters())  # No second copy.
    x, ids, weights = routing()
    out = layer.forward_modular(x, weights, ids)
    assert out.dtype == x.dtype
    assert distance(out, reference(matrices, x, ids, weights)) < case.tolerance


@pytest.mark.parametrize("placement", ["linear", "round_robin"])
def test_two_ranks_of_expert_parallelism_sum_to_the_whole(placement: str) -> None:
    case, (x, ids, weights) = CASES["nvfp4-modelopt"], routing()
    ids[0] = torch.tensor([-1, EXPERTS, 2])  # -1 is padding, and there is no expert 6.
    for rank in range(2):
        moe = moe_config(ep_size=2, ep_rank=rank, use_ep=True)
        layer = experts_of(case.declared, moe, placement=placement)
        here = [e for e in range(EXPERTS) if int(layer.expert_map[e]) >= 0]
        assert here == ([rank, rank + 2, rank + 4] if placement == "round_robin" else
                        list(range(3 * rank, 3 * rank + 3)))  # fmt: skip
        matrices = load(layer, case)
        layer.quant_method.process_weights_after_loading(layer)
        out = layer.forward_modular(x, weights, ids.long())
        wanted = reference(matrices, x, ids, weights, here)
        assert distance(out, wanted) < case.tolerance
        absent = [t for t in range(TOKENS) if not set(ids[t].tolist()) & set(here)]
        assert all(bool((out[t] == 0).all()) for t in absent)


def test_gpt_oss_has_interleaved_rows_and_biases() -> None:
    moe = moe_config(activation=MoEActivation.SWIGLUOAI, has_bias=True)
    layer = experts_of({"quant_method": "gpt_oss_mxfp4"}, moe)
    generator = torch.Generator().manual_seed(5)
    w1 = torch.randn(EXPERTS * 2 * INTER, HIDDEN, generator=generator).bfloat16() * HIDDEN**-0.5
    w2 = torch.randn(EXPERTS * HIDDEN, INTER, generator=generator).bfloat16() * INTER**-0.5
    dense, biases = [], []
    for stem, weight, rows in (("w13", w1, 2 * INTER), ("w2", w2, HIDDEN)):
        whole = nf.quantize(weight, "mxfp4", layout="linear")
        bias = torch.randn(EXPERTS, rows, generator=generator).bfloat16()
        tensors = {"weight": whole.values, "weight_scale": whole.scales}
        tensors = {key: value.reshape(EXPERTS, rows, -1) for key, value in tensors.items()}
        for name, tensor in {**tensors, "bias": bias}.items():
            parameter = getattr(layer, f"{stem}_{name}")
            parameter.weight_loader(parameter, tensor, weight_name=f"{stem}_{name}",
                                    shard_id=None, expert_id=None)  # fmt: skip
        dense.append(nf.dequantize(whole).double().reshape(EXPERTS, rows, -1))
        biases.append(bias.double())
    layer.quant_method.process_weights_after_loading(layer)
    x, ids, weights = routing()
    wanted = torch.zeros(TOKENS, HIDDEN, dtype=torch.float64)
    for token in range(TOKENS):
        for expert, weight in zip(ids[token].tolist(), weights[token].double(), strict=True):
            both = dense[0][expert] @ x[token].double() + biases[0][expert]
            gate, up = both[::2].clamp(max=7.0), both[1::2].clamp(-7.0, 7.0)
            inner = gate * torch.sigmoid(1.702 * gate) * (up + 1)
            wanted[token] += weight * (dense[1][expert] @ inner + biases[1][expert])
    assert distance(layer.forward_modular(x, weights, ids), wanted) < 0.01


def test_the_limit_of_swiglu_is_applied() -> None:
    case, (x, ids, weights) = CASES["mxfp4"], routing()
    layer = experts_of(case.declared, moe_config(swiglu_limit=0.5))
    matrices = load(layer, case)
    layer.quant_method.process_weights_after_loading(layer)
    out = layer.forward_modular(x, weights, ids)
    assert distance(out, reference(matrices, x, ids, weights)) > 0.1
    for token in range(TOKENS):
        wanted = torch.zeros(HIDDEN, dtype=torch.float64)
        for expert, weight in zip(ids[token].tolist(), weights[token].double(), strict=True):
            one, row = matrices[expert], x[token].double()
            gate, up = (one["w1"] @ row).clamp(max=0.5), (one["w3"] @ row).clamp(-0.5, 0.5)
            wanted += weight * (one["w2"] @ (torch.nn.functional.silu(gate) * up))
        assert distance(out[token], wanted) < case.tolerance


@pytest.mark.parametrize(("changes", "reason"), [
    ({"is_lora_enabled": True}, "LoRA adapters"),
    ({"enable_eplb": True}, "enable-eplb"),
    ({"tp_shard_with_padding": True}, "padded for tensor parallelism"),
    ({"ep_size": 2, "ep_rank": 0, "use_ep": True, "dp_size": 2}, "data parallelism"),
])  # fmt: skip
def test_what_is_not_served_is_refused_with_the_reason(changes: Any, reason: str) -> None:
    with pytest.raises(NotImplementedError, match=reason):
        experts_of(CASES["nvfp4-ct"].declared, moe_config(**changes))


def test_an_activation_that_is_not_served_is_named() -> None:
    case = CASES["mxfp4"]
    layer = experts_of(case.declared, moe_config(activation=MoEActivation.SITU))
    load(layer, case)
    with pytest.raises(NotImplementedError, match="activation: .*got situ"):
        layer.quant_method.process_weights_after_loading(layer)
    assert list(layer.parameters())  # Nothing is lost.


@pytest.mark.parametrize(("declared", "reason"), [
    ({"quant_method": "fp8", "activation_scheme": "static"}, "weight_block_size"),
    ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "MIXED_PRECISION"),
    ({"quant_method": "gptq"}, "gptq"),
])  # fmt: skip
def test_checkpoints_that_are_not_read_are_refused(declared: Any, reason: str) -> None:
    with pytest.raises(NotImplementedError, match=reason):
        quantization.get_quantization_config("narrowfloat").from_config(declared)


def test_integers_of_compressed_tensors_are_refused() -> None:
    declared = _compressed("pack-quantized", 4, "int", "group", group_size=128)
    with pytest.raises(NotImplementedError, match="got int of 4 bits"):
        experts_of(declared, moe_config())


def test_a_checkpoint_is_claimed_by_name_or_by_the_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours = quantization.get_quantization_config("narrowfloat")
    declared = CASES["nvfp4-ct"].declared
    monkeypatch.delenv("NARROWFLOAT_VLLM", raising=False)
    assert ours.override_quantization_method(declared, None) is None
    assert ours.override_quantization_method(declared, "narrowfloat") == "narrowfloat"
    monkeypatch.setenv("NARROWFLOAT_VLLM", "1")
    assert ours.override_quantization_method(declared, None) == "narrowfloat"
    assert ours.override_quantization_method(declared, "compressed-tensors") is None
    assert ours.override_quantization_method({"quant_method": "gptq"}, None) is None
    for others in (_compressed("pack-quantized", 4, "int", "group", group_size=128),
                   _compressed("float-quantized", 8, "float", "channel")):  # fmt: skip
        assert ours.override_quantization_method(others, None) is None
    monkeypatch.setenv("NARROWFLOAT_VLLM", "yes")
    with pytest.raises(ValueError, match="NARROWFLOAT_VLLM: expected 0 or 1, got 'yes'"):
        ours.override_quantization_method(declared, None)
