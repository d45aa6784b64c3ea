"""The plug-in for vLLM against vLLM's own classes: loading, packing and running experts on the CPU.

Experts of random checkpoints are loaded by vLLM's RoutedExperts and judged by dequantized weights
in fp64. Skipped without vLLM (./test.sh --with-engines).
"""

from __future__ import annotations

import json
import pathlib
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

import narrowfloat as nf

torch = pytest.importorskip("torch", reason="torch is not installed; ./test.sh --with-engines")
pytest.importorskip("vllm", reason="vllm is not installed; ./test.sh --with-engines")

from safetensors.torch import save_file  # noqa: E402
from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config  # noqa: E402
from vllm.distributed import parallel_state  # noqa: E402
from vllm.model_executor.layers import quantization  # noqa: E402
from vllm.model_executor.layers.fused_moe import config as moe_configs  # noqa: E402
from vllm.model_executor.layers.fused_moe.activation import MoEActivation  # noqa: E402
from vllm.model_executor.layers.fused_moe.expert_map_manager import (  # noqa: E402
    ExpertMapManager,
)
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts  # noqa: E402
from vllm.model_executor.layers.quantization import modelopt  # noqa: E402
from vllm.plugins import load_plugins_by_group  # noqa: E402


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


def load(layer: Any, case: Case) -> list[dict[str, torch.Tensor]]:
    """Fills a layer through vLLM's loaders as its models do; the matrices of all experts."""
    parameters = dict(layer.named_parameters())
    found = []
    for expert, (tensors, matrices) in enumerate(matrices_of_experts(case)):
        for (shard, name), tensor in tensors.items():
            full = f"{'w2' if shard == 'w2' else 'w13'}_{name}"
            parameter = parameters[full]
            parameter.weight_loader(parameter, tensor, full, shard, expert, return_success=True)
        found.append(matrices)
    return found


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
    tensors, run = gpt_oss()
    for (stem, name), tensor in tensors.items():
        parameter = getattr(layer, f"{stem}_{name}")
        parameter.weight_loader(parameter, tensor, weight_name=f"{stem}_{name}", shard_id=None,
                                expert_id=None)  # fmt: skip
    layer.quant_method.process_weights_after_loading(layer)
    x, ids, weights = routing()
    assert distance(layer.forward_modular(x, weights, ids), run(x, ids, weights)) < 0.01


def test_the_limit_of_swiglu_is_applied() -> None:
    case, (x, ids, weights) = CASES["mxfp4"], routing()
    layer = experts_of(case.declared, moe_config(swiglu_limit=0.5))
    matrices = load(layer, case)
    layer.quant_method.process_weights_after_loading(layer)
    out = layer.forward_modular(x, weights, ids)
    assert distance(out, reference(matrices, x, ids, weights)) > 0.1
    wanted = reference(matrices, x, ids, weights, limit=0.5)
    assert distance(out, wanted) < case.tolerance


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


def test_modelopt_configs_that_we_write_are_read(tmp_path: pathlib.Path) -> None:
    """vLLM's own classes for ModelOpt's FP8 and mixes, from either file."""
    source = tmp_path / "model"
    source.mkdir()
    names = [f"model.layers.0.{name}" for name in ("self_attn.o_proj", "mlp.experts.0.up_proj")]
    weights = {f"{name}.weight": torch.randn(64, 64) for name in [*names, "lm_head"]}
    save_file(weights, source / "model.safetensors")
    (source / "config.json").write_text('{"model_type": "qwen3_moe"}')
    made = {"FP8": ("fp8-tensor-modelopt", []),
            "FP8_PER_CHANNEL_PER_TOKEN": ("fp8-channel-modelopt", []),
            "MIXED_PRECISION": ("nvfp4-modelopt", [("*.self_attn.*", "fp8-tensor-modelopt")])}
    for algorithm, (to, rules) in made.items():
        nf.quantize_checkpoint(source, tmp_path / to, to, rules=rules)
        for name in ("config.json", "hf_quant_config.json"):
            config = json.loads((tmp_path / to / name).read_text())
            config = config.get("quantization_config", config)
            if algorithm != "MIXED_PRECISION":
                read = modelopt.ModelOptFp8Config.from_config(config)
                assert read.quant_method == algorithm
            else:
                read = modelopt.ModelOptMixedPrecisionConfig.from_config(config)
                assert [read._resolve_quant_algo(one) for one in names] == ["FP8", "W4A16_NVFP4"]
            assert read.is_layer_excluded("lm_head") and not read.is_layer_excluded(names[0])


def test_integers_of_compressed_tensors_are_refused() -> None:
    declared = compressed("pack-quantized", 4, "int", "group", group_size=128)
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
    for others in (compressed("pack-quantized", 4, "int", "group", group_size=128),
                   compressed("float-quantized", 8, "float", "channel")):  # fmt: skip
        assert ours.override_quantization_method(others, None) is None
    monkeypatch.setenv("NARROWFLOAT_VLLM", "yes")
    with pytest.raises(ValueError, match="NARROWFLOAT_VLLM: expected 0 or 1, got 'yes'"):
        ours.override_quantization_method(declared, None)
