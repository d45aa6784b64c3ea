"""Models of transformers with their experts in narrowfloat's layers, against eager ones in fp32."""

from __future__ import annotations

import copy
import importlib
import json
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import narrowfloat as nf

torch = pytest.importorskip("torch", reason="torch is not installed; ./test.sh --with-torch")
pytest.importorskip("transformers", minversion="5.9", reason="transformers is not installed; "
                    "./test.sh --with-torch")

import transformers  # noqa: E402

import narrowfloat.transformers as nftr  # noqa: E402
from narrowfloat.transformers import _experts  # noqa: E402
from transformers_models import (  # noqa: E402
    IDS,
    MODELS,
    distance,
    load,
    logits,
    make,
    quantize_dense,
)

nftr.register()
HAS_GPU = torch.cuda.is_available() and nf.build_info()["cuda_enabled"]
DEVICES = ["cpu", "cuda"] if HAS_GPU else ["cpu"]
# Largest median distance of the logits of a random model of two or three layers from fp32. Without
# experts it is above 1.
FAR = {"bf16": 0.006, "fp8_block": 0.11, "mxfp8": 0.12, "mxfp4_bf16": 0.35, "mxfp4_mxfp8": 0.36,
       "mxfp4_fp8": 0.36, "nvfp4_bf16": 0.28, "nvfp4_per_token": 0.43,
       "nvfp4_fp8_exact": 0.29, "nvfp4_fp8_rounded": 0.29, "mxfp4_fp8_token": 0.36,
       "nvfp4_fp8_token": 0.29, "mxfp4_int8": 0.35, "nvfp4_int8": 0.28}  # fmt: skip
# Modes that lose nothing but the rounding of rows to bfloat16 beside experts that were dequantized.
SHARP = {"nvfp4_bf16": "nvfp4", "mxfp4_bf16": "mxfp4"}


@pytest.fixture(autouse=True)
def forgets_compiled_code() -> Iterator[None]:
    """torch keeps few versions of a function, for all tests together."""
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The random models."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def references(folder: Path) -> dict[str, torch.Tensor]:
    """Logits of eager experts in fp32."""
    return {name: logits(load(make(name, folder), experts_implementation="eager"))
            for name in MODELS}  # fmt: skip


def quantized(path: Path, mode: str, **options: Any) -> Any:
    """The model with its experts in a mode."""
    names = ("math", "modules_to_not_convert", "keep_weights", "fast_sums")
    given = {name: options.pop(name) for name in names if name in options}
    config = nftr.NarrowfloatConfig(mode=mode, **given)
    return load(path, quantization_config=config, **options)


def dense_experts(model: Any) -> list[str]:
    """Parameters of experts that are not in a layer."""
    return [name for name, _ in model.named_parameters() if ".experts." in name]


@pytest.mark.parametrize("name", list(MODELS))
def test_logits(name: str, folder: Path, references: dict[str, torch.Tensor]) -> None:
    """Near to those of eager experts, which decide most of them."""
    for mode in ("bf16", "nvfp4_bf16"):
        model = quantized(make(name, folder), mode)
        found = [one for one in model.modules() if isinstance(one, nftr.Experts)]
        assert len(found) >= model.config.num_hidden_layers - 1 and not dense_experts(model)
        assert all(one.layer.config.mode == mode for one in found)
        assert distance(logits(model), references[name]) < FAR[mode], mode
    for layer in found:
        layer.forward = lambda hidden, *_: torch.zeros_like(hidden)
    assert distance(logits(model), references[name]) > 1


@pytest.mark.parametrize("mode", list(SHARP))
@pytest.mark.parametrize("name", list(MODELS))
def test_the_weights_are_the_quantizers(name: str, mode: str, folder: Path) -> None:
    """Beside eager experts with the same quantized weights the distance is that of bf16."""
    path = make(name, folder)
    wanted = logits(quantize_dense(load(path, experts_implementation="eager"), SHARP[mode]))
    assert distance(logits(quantized(path, mode)), wanted) < FAR["bf16"]


@pytest.mark.parametrize("mode", list(FAR))
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_modes(
    name: str, mode: str, folder: Path, references: dict[str, torch.Tensor]
) -> None:
    """All modes without static scales."""
    assert distance(logits(quantized(make(name, folder), mode)), references[name]) < FAR[mode]


def test_fast_sums(folder: Path) -> None:
    """The layers have them, in a saved model where the caller of from_pretrained() wants them."""
    path = make("gpt_oss", folder)
    wanted = logits(quantized(path, "mxfp4_bf16"))
    model = quantized(path, "mxfp4_bf16", fast_sums=True, keep_weights=True)
    assert distance(logits(model), wanted) < FAR["bf16"]
    model.save_pretrained(folder / "fast_sums")
    again = load(folder / "fast_sums", quantization_config=nftr.NarrowfloatConfig(fast_sums=True))
    plain = load(folder / "fast_sums")
    for one, has in ((model, True), (again, True), (plain, False)):
        layers = [module.layer for module in one.modules() if isinstance(module, nftr.Experts)]
        assert layers and all(layer.config.fast_sums is has for layer in layers)
    assert torch.equal(logits(again), logits(model)) and torch.equal(logits(plain), wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_types_of_models(
    dtype: torch.dtype, folder: Path, references: dict[str, torch.Tensor]
) -> None:
    """Experts of a bfloat16 and of a float16 model; results have the model's type."""
    for name in ("qwen3_moe", "gpt_oss"):
        model = quantized(make(name, folder), "mxfp8", dtype=dtype)
        assert model.dtype == dtype and model(IDS).logits.dtype == dtype
        assert distance(logits(model), references[name]) < FAR["mxfp8"] + 0.03


@pytest.mark.parametrize("name", list(MODELS))
def test_greedy_generation(name: str, folder: Path) -> None:
    """32 tokens with a cache are those of whole forwards; torch.compile changes no bit."""
    model = quantized(make(name, folder), "nvfp4_bf16")
    prompt = IDS[:1, :8]
    tokens = model.generate(prompt, max_new_tokens=32, do_sample=False)
    assert tokens.shape == (1, 40) and torch.equal(tokens[:, :8], prompt)
    scores = logits(model, tokens)[0, 7:-1]
    chosen = scores.gather(1, tokens[0, 8:, None])[:, 0]
    assert (scores.max(1).values - chosen < 1e-3).all()
    assert len(set(tokens[0, 8:].tolist())) > 1
    compiled = torch.compile(model.forward, backend="aot_eager")
    with torch.no_grad():
        assert distance(compiled(IDS).logits, logits(model)) < 1e-5


def test_one_graph(folder: Path) -> None:
    """Router and layer trace without a break."""
    block = quantized(make("qwen3_moe", folder), "nvfp4_bf16").model.layers[0].mlp
    x = torch.randn(1, 6, 128, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x), block(x))


@pytest.mark.parametrize(("name", "mode"), [
    *((name, "nvfp4_bf16") for name in MODELS), ("gpt_oss", "bf16"), ("qwen3_moe", "mxfp8")])
def test_saved_models_keep_their_bits(name: str, mode: str, folder: Path, tmp_path: Path) -> None:
    """save_pretrained() and from_pretrained(), which needs no argument."""
    model = quantized(make(name, folder), mode, keep_weights=True, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert (saved["quant_method"], saved["mode"]) == ("narrowfloat", mode)
    again = load(tmp_path, dtype="auto")
    assert not dense_experts(again)
    assert torch.equal(logits(again), logits(model))
    again.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(load(tmp_path / "again", dtype="auto")), logits(model))


def test_what_is_not_kept_cannot_be_saved(folder: Path, tmp_path: Path) -> None:
    """The message says how it can."""
    model = quantized(make("qwen3_moe", folder), "nvfp4_bf16")
    with pytest.raises(ValueError, match="keep_weights=True"):
        model.save_pretrained(tmp_path)


def test_a_damaged_save_is_refused(folder: Path, tmp_path: Path) -> None:
    """A layer whose tensors are not all there."""
    import safetensors.torch

    model = quantized(make("qwen3_moe", folder), "nvfp4_bf16", keep_weights=True)
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    del tensors["model.layers.1.mlp.experts.w2"]
    safetensors.torch.save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.experts: w2: missing"):
        load(tmp_path)


def test_one_matrix_at_a_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a dense matrix is quantized, those before it are gone."""
    alive: list[weakref.ref[Any]] = []
    most = []
    add = _experts.ExpertsPlan.add

    def counting(self: Any, parameter: str, tensor: torch.Tensor, *rest: Any) -> None:
        alive.append(weakref.ref(tensor.untyped_storage()))
        alive.append(weakref.ref(tensor))
        most.append(sum(one() is not None for one in alive[1::2]))
        add(self, parameter, tensor, *rest)

    monkeypatch.setattr(_experts.ExpertsPlan, "add", counting)
    quantized(make("qwen3_moe", folder), "nvfp4_bf16", dtype=torch.bfloat16)
    assert len(most) == 4 and max(most) == 1


def test_modules_to_not_convert(folder: Path, references: dict[str, torch.Tensor]) -> None:
    """They keep their dense weights and transformers' own computation."""
    name = "model.layers.0.mlp.experts"
    model = quantized(make("qwen3_moe", folder), "nvfp4_bf16", modules_to_not_convert=[name])
    assert set(dense_experts(model)) == {f"{name}.gate_up_proj", f"{name}.down_proj"}
    assert distance(logits(model), references["qwen3_moe"]) < FAR["nvfp4_bf16"]
    whole = quantized(make("qwen3_moe", folder), "nvfp4_bf16")
    assert distance(logits(model), logits(whole)) > 1e-3


def test_fast_math_is_passed_on(folder: Path) -> None:
    """Other bits than the exact quantizer's, by little."""
    exact, fast = (logits(quantized(make("qwen3_moe", folder), "nvfp4_bf16", math=math))
                   for math in ("exact", "fast"))  # fmt: skip
    assert distance(fast, exact) < 0.1


def test_experts_function(folder: Path, references: dict[str, torch.Tensor]) -> None:
    """experts_implementation="narrowfloat" runs dense bfloat16 experts; changed weights count."""
    path = make("qwen3_moe", folder)
    model = load(path, dtype=torch.bfloat16, experts_implementation="narrowfloat")
    plain = load(path, dtype=torch.bfloat16, experts_implementation="eager")
    assert distance(logits(model), references["qwen3_moe"]) < 0.04
    assert distance(logits(model), logits(plain)) < 0.03
    before = logits(model)
    with torch.no_grad():
        model.model.layers[0].mlp.experts.down_proj.mul_(2)
        plain.model.layers[0].mlp.experts.down_proj.mul_(2)
    assert distance(logits(model), before) > 0.05
    assert distance(logits(model), logits(plain)) < 0.03
    assert set(model.state_dict()) == set(plain.state_dict())
    wide = load(path, experts_implementation="narrowfloat")
    with pytest.raises(ValueError, match=r"gate_up_proj: .*bfloat16.*float32"):
        logits(wide)


class Mesh:
    """Answers what transformers asks of a mesh of ranks."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks

    def get_local_rank(self) -> int:
        """This rank's number."""
        return self.rank

    def size(self, *_: Any) -> int:
        """How many there are."""
        return self.ranks


def local_routing(ids: torch.Tensor, weights: torch.Tensor, mesh: Mesh) -> Any:
    """transformers' expert parallelism: ids from 0, those of other ranks the number of experts
    here, with weight 0."""
    experts = 8 // mesh.ranks
    elsewhere = ids // experts != mesh.rank
    return (torch.where(elsewhere, experts, ids % experts), weights.masked_fill(elsewhere, 0))


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_expert_parallelism_of_transformers(name: str, folder: Path) -> None:
    """The parts of ranks add up to the experts, also with fewer on a rank than a token has."""
    model = load(make(name, folder), dtype=torch.bfloat16, experts_implementation="narrowfloat")
    block = model.model.layers[0].mlp
    router = block.router if name == "gpt_oss" else block.gate
    hidden = torch.randn(20, 128, generator=torch.Generator().manual_seed(3)).bfloat16()
    parallel = importlib.import_module("transformers.integrations.tensor_parallel")
    with torch.no_grad():
        routed = router(hidden)
        weights, ids = routed[-2:]
        wanted = block.experts(hidden, ids, weights).float()
        for ranks in (2, 8):
            total = torch.zeros_like(wanted)
            for rank in range(ranks):
                mesh, own = Mesh(rank, ranks), slice(8 // ranks * rank, 8 // ranks * (rank + 1))
                local, masked = local_routing(ids, weights, mesh)
                if hasattr(parallel, "RouterParallel"):  # In later versions within the experts.
                    _, *found = parallel.RouterParallel()._prepare_output_fn(router, routed, mesh)
                    assert torch.equal(found[1], local) and torch.equal(found[0], masked)
                part = copy.deepcopy(block.experts)
                part.__dict__.pop("_narrowfloat")
                for key, value in list(part.named_parameters()):
                    setattr(part, key, torch.nn.Parameter(value[own].clone()))
                part.num_experts = 8 // ranks
                total += part(hidden, local, masked)
            assert (total - wanted).norm() < 0.01 * wanted.norm(), ranks


def test_ranks_of_transformers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooks that sum over ranks stay when experts are quantized; loading shards is refused."""
    path, mxfp8 = make("qwen3_moe", folder), nftr.NarrowfloatConfig(mode="mxfp8")
    model, seen = load(path, dtype=torch.bfloat16), []
    for layer in model.model.layers:
        layer.mlp.experts.register_forward_pre_hook(lambda _, given: seen.append(len(given)))
        layer.mlp.experts.register_forward_hook(lambda *_: torch.zeros_like(_[-1]))
    nothing = logits(model)
    assert torch.equal(logits(nftr.quantize_experts(model, mxfp8)), nothing)
    assert seen == [3] * 4
    monkeypatch.setattr(transformers.PreTrainedModel, "_device_mesh", Mesh(0, 2), raising=False)
    with pytest.raises(ValueError, match="expected one rank, got .* with 2; leave Narrowfloat"):
        load(path, quantization_config=mxfp8)


def test_refusals(folder: Path) -> None:
    """A request that cannot be right is refused before a weight is read."""
    with pytest.raises(ValueError, match="mode: expected one of .*got 'int4'"):
        nftr.NarrowfloatConfig(mode="int4")
    with pytest.raises(ValueError, match="statistics: mode nvfp4 has static activation scales"):
        nftr.NarrowfloatConfig(mode="nvfp4")
    with pytest.raises(ValueError, match="math: "):
        nftr.NarrowfloatConfig(math="quick")
    import transformers

    config = transformers.Qwen3Config(
        vocab_size=96, hidden_size=64, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32)  # fmt: skip
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder / "dense")
    with pytest.raises(ValueError, match="has no experts"):
        quantized(folder / "dense", "nvfp4_bf16")


def test_an_unknown_activation_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The formula is found by asking the module, not by its name."""
    from transformers.models.qwen3_moe import modeling_qwen3_moe

    experts = modeling_qwen3_moe.Qwen3MoeExperts
    monkeypatch.setattr(experts, "_apply_gate", lambda self, rows: rows.chunk(2, -1)[0].sin())
    with pytest.raises(NotImplementedError, match=r"layers\.0\.mlp\.experts: Qwen3MoeExperts .*"
                       "modules_to_not_convert"):  # fmt: skip
        quantized(make("qwen3_moe", folder), "nvfp4_bf16")
    # The order of gate and up is found likewise.
    monkeypatch.setattr(experts, "_apply_gate", lambda self, rows: (
        self.act_fn(rows.chunk(2, -1)[1]) * rows.chunk(2, -1)[0]))  # fmt: skip
    wanted = logits(load(make("qwen3_moe", folder), experts_implementation="batched_mm"))
    got = logits(quantized(make("qwen3_moe", folder), "bf16"))
    assert distance(got, wanted) < FAR["bf16"]


def test_a_loaded_model_is_quantized_in_place(folder: Path) -> None:
    """The bits of the model that was quantized while it loaded."""
    path = make("gpt_oss", folder)
    model = load(path)
    alive = [weakref.ref(one) for name, one in model.named_parameters() if ".experts." in name]
    assert nftr.quantize_experts(model, nftr.NarrowfloatConfig("mxfp4_bf16")) is model
    assert len(alive) == 8 and not any(one() is not None for one in alive)
    assert torch.equal(logits(model), logits(quantized(path, "mxfp4_bf16")))
    with pytest.raises(ValueError, match="has no experts"):
        nftr.quantize_experts(torch.nn.Linear(2, 2), nftr.NarrowfloatConfig())


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_calibration(
    name: str, folder: Path, references: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    """Static modes take its file; second moments and Hessians are those of the rows."""
    path = make(name, folder)
    model = load(path, experts_implementation="eager")
    first = "model.layers.0.mlp.experts"
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    hook = model.get_submodule(first).register_forward_pre_hook(
        lambda _, given: seen.append((given[0].reshape(-1, 128), given[1])))  # fmt: skip
    into_o: list[torch.Tensor] = []
    o_hook = model.get_submodule("model.layers.0.self_attn.o_proj").register_forward_pre_hook(
        lambda _, given: into_o.append(given[0].flatten()))  # fmt: skip
    found = nftr.calibrate(model, [IDS[:1], IDS[1:]], path=tmp_path / "h", statistics="hessian")
    hook.remove()
    o_hook.remove()
    rows, ids = torch.cat([one for one, _ in seen]), torch.cat([one for _, one in seen])
    mine = rows[(ids == 3).any(1)].float()
    assert int(found[f"{first}.input.count"][3]) == len(mine) > 0
    assert torch.equal(found[f"{first}.input.amax"][3], mine.abs().max())
    assert torch.equal(found["model.layers.0.self_attn.o_proj.linear.amax"],
                       torch.cat(into_o).abs().max().reshape(1))
    assert int(found["lm_head.linear.count"]) == IDS.numel()
    assert torch.allclose(found[f"{first}.input.hessian"][3], mine.T @ mine / len(mine), atol=1e-5)
    squares = nftr.calibrate(model, [IDS], path=tmp_path / "s", statistics="second_moment")
    for side in ("input", "inter"):
        diagonal = found[f"{first}.{side}.hessian"].diagonal(dim1=1, dim2=2)
        assert torch.allclose(squares[f"{first}.{side}.second_moment"], diagonal, atol=1e-5)
    for mode, far in (("fp8_tensor", 0.13), ("nvfp4", 0.43)):
        static = load(path, quantization_config=nftr.NarrowfloatConfig(
            mode, statistics=tmp_path / "h"))  # fmt: skip
        assert distance(logits(static), references[name]) < far, mode
    with pytest.raises(ValueError, match="tokenizer"):
        nftr.calibrate(model, ["text"], path=tmp_path / "t")
    with pytest.raises(ValueError, match="no dense experts"):
        nftr.calibrate(static, [IDS], path=tmp_path / "t")


def test_register_twice() -> None:
    """As often as one likes."""
    nftr.register()
    nftr.register()


@pytest.mark.skipif(not HAS_GPU, reason="no GPU that the package has code for")
@pytest.mark.parametrize("name", list(MODELS))
def test_on_a_gpu(name: str, folder: Path, references: dict[str, torch.Tensor]) -> None:
    """Loaded onto it, generated from it, compiled with CUDA graphs."""
    pytest.importorskip("accelerate", reason="device_map needs accelerate")
    model = quantized(make(name, folder), "nvfp4_bf16", dtype=torch.bfloat16, device_map="cuda")
    assert "cuda" in repr(next(one for one in model.modules() if isinstance(one, nftr.Experts)))
    assert distance(logits(model), references[name]) < FAR["nvfp4_bf16"] + 0.03
    assert model.generate(IDS[:1].cuda(), max_new_tokens=32, do_sample=False).shape == (1, 52)
    compiled = torch.compile(model.forward, mode="reduce-overhead")
    with torch.no_grad():
        for _ in range(3):
            torch.compiler.cudagraph_mark_step_begin()
            got = compiled(IDS.cuda(), use_cache=False).logits.float().cpu()
        assert distance(got, logits(model)) < 0.02
