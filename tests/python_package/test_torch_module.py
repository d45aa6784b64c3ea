"""nft.Moe as torch users expect a module: state, devices, gradients; QuantizedTensors of torch."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Iterator

import pytest

import narrowfloat as nf

torch = pytest.importorskip("torch", reason="torch is not installed; ./test.sh --with-torch")

import narrowfloat.torch as nft  # noqa: E402

E, K, H, I, T = 6, 2, 128, 64, 10
HAS_GPU = torch.cuda.is_available() and nf.build_info()["cuda_enabled"]
DEVICES = ["cpu", "cuda"] if HAS_GPU else ["cpu"]
GENERATOR = torch.Generator().manual_seed(27)
W1 = torch.randn(E, 2 * I, H, generator=GENERATOR) / 8
W2 = torch.randn(E, H, I, generator=GENERATOR) / 8
X = torch.randn(T, H, generator=GENERATOR).bfloat16()
IDS = torch.stack([torch.randperm(E, generator=GENERATOR)[:K] for _ in range(T)])
WEIGHTS = torch.rand(T, K, generator=GENERATOR)
FORMATS = {"bf16": None, "fp8_block": "fp8_128x128", "mxfp8": "mxfp8", "mxfp4_bf16": "mxfp4",
           "nvfp4_bf16": "nvfp4", "nvfp4": "nvfp4"}  # fmt: skip
STATIC = {"nvfp4": {"input_multiplier": 600.0, "inter_multiplier": torch.full((E,), 500.0)}}


@pytest.fixture(autouse=True)
def forgets_compiled_code() -> Iterator[None]:
    """torch keeps few versions of a function, for all tests together."""
    yield
    torch._dynamo.reset()


def prepared(mode: str = "nvfp4_bf16", **changes: object) -> nft.Moe:
    """A module that keeps its weights; block-scaled FP8 needs widths of 128."""
    w1, w2, inter = W1, W2, I
    if mode == "fp8_block":
        w1, w2, inter = torch.cat([W1, W1], 1), torch.cat([W2, W2], 2), 2 * I
    if FORMATS[mode] is None:
        parts = (w1.bfloat16(), w2.bfloat16())
    else:
        parts = tuple(nf.quantize(w, FORMATS[mode], batched=True) for w in (w1, w2))
    config = nf.MoeConfig(hidden=H, inter=inter, experts=E, top_k=K, mode=mode, **changes)
    biases = {"bias1": torch.randn(E, 2 * inter), "bias2": torch.randn(E, H).bfloat16()}
    return nft.Moe.prepare(*parts, config, **biases, **STATIC.get(mode, {}))


def run(module: nft.Moe, **more: object) -> torch.Tensor:
    """One call."""
    return module(X, ids=IDS, weights=WEIGHTS, **more)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.uint8])
def test_ids_and_absent_experts(dtype: torch.dtype, device: str) -> None:
    """Any integer type; by default what names no expert adds nothing, in a batch, too."""
    module = prepared().to(device)
    x, ids, weights = X.to(device), IDS.to(device), WEIGHTS.to(device)
    wanted = module(x, ids=ids, weights=weights)
    assert torch.equal(module(x, ids=ids.to(dtype), weights=weights), wanted)
    batch = module(x.reshape(2, 5, H), ids=ids.reshape(2, 5, K), weights=weights.reshape(2, 5, K))
    assert batch.shape == (2, 5, H) and torch.equal(batch.reshape(T, H), wanted)
    absent = ids.clone()
    absent[3] = E
    absent[4, 0] = 200
    if dtype != torch.uint8:
        absent[5] = -1
    got = module(x, ids=absent.to(dtype), weights=weights)
    assert not got[3].any() and got[4].any() and torch.equal(got[:3], wanted[:3])
    assert not torch.equal(got[4], wanted[4]) and torch.equal(got[6:], wanted[6:])
    assert got[5].any() == (dtype == torch.uint8)
    if device == "cpu":
        with pytest.raises(ValueError, match="^ids: expected expert ids"):
            module(x, ids=absent.to(dtype), weights=weights, allow_absent=False)


@pytest.mark.parametrize("device", DEVICES)
def test_errors_of_a_gpu_count_what_is_not_allowed(device: str) -> None:
    """-1 and beyond; none where they are allowed."""
    if device == "cpu":
        pytest.skip("on the CPU they are exceptions")
    layer = prepared().to(device).layer
    ids = IDS.to(device).clone()
    ids[2, 0], ids[3, 1] = -1, E
    errors = torch.zeros(2, dtype=torch.int64, device=device)
    given = {"ids": ids, "weights": WEIGHTS.to(device), "errors": errors}
    layer.run(X.to(device), **given, allow_absent=True)
    assert int(errors[0]) & 0xFFFFFFFF == 0
    layer.run(X.to(device), **given)
    assert int(errors[0]) & 0xFFFFFFFF == 2


@pytest.mark.parametrize("mode", list(FORMATS))
def test_states_keep_every_bit(mode: str) -> None:
    """state_dict(), files of torch, pickle, deepcopy: the same layer."""
    torch.manual_seed(1)
    module = prepared(mode)
    wanted = run(module)
    state = module.state_dict()
    assert all(isinstance(tensor, torch.Tensor) for tensor in state.values())
    torch.manual_seed(2)
    other = prepared(mode)
    assert not torch.equal(run(other), wanted)  # Its biases differ.
    assert other.load_state_dict(state).missing_keys == []
    assert torch.equal(run(other), wanted)
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    assert torch.equal(run(nft.Moe.of_state(torch.load(file))), wanted)
    assert torch.equal(run(pickle.loads(pickle.dumps(module))), wanted)
    again = copy.deepcopy(module)
    assert torch.equal(run(again), wanted) and again.layer is module.layer
    again.load_state_dict(prepared(mode).state_dict())
    assert torch.equal(run(module), wanted) and not torch.equal(run(again), wanted)


def test_a_module_in_a_model() -> None:
    """Names have the module's prefix; what is missing, strange or of another shape is named."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), prepared())
    state = model.state_dict()
    assert {"0.weight", "1.config", "1.w1", "1.w1_scales", "1.bias2"} <= state.keys()
    fresh = torch.nn.Sequential(torch.nn.Linear(4, 4), prepared())
    fresh.load_state_dict(state)
    assert torch.equal(run(fresh[1]), run(model[1]))
    found = fresh.load_state_dict({"0.weight": state["0.weight"], "1.more": X}, strict=False)
    assert "1.w1" in found.missing_keys and found.unexpected_keys == ["1.more"]
    half = {name: tensor for name, tensor in state.items() if name != "1.w2"}
    with pytest.raises(RuntimeError, match=r"1\.: w2: missing"):
        fresh.load_state_dict(half)
    config = nf.MoeConfig(hidden=H, inter=I, experts=E - 1, top_k=K)
    small = nft.Moe.prepare(W1[1:].bfloat16(), W2[1:].bfloat16(), config)
    with pytest.raises(RuntimeError, match="expected a layer of H=128, E=5, k=2, got .*E=6"):
        small.load_state_dict(prepared().state_dict())
    with pytest.raises(RuntimeError, match="no configuration"):
        small.load_state_dict({**small.state_dict(), "config": torch.ones(3, dtype=torch.uint8)})


def test_a_module_of_a_layer_says_what_it_cannot() -> None:
    """Its weights exist in packed form alone."""
    module = nft.Moe(prepared().layer)
    with pytest.warns(UserWarning, match="no weights of a Moe"):
        assert not module.state_dict()
    for call in (lambda: pickle.dumps(module), lambda: module.to("meta")):
        with pytest.raises(RuntimeError, match=r"Moe\.prepare\(\)"):
            call()
    assert torch.equal(run(module.to(torch.float16).cpu()), run(module))
    module.load_state_dict(prepared().state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert module.state_dict() and module.kept_bytes > 0
    with pytest.raises(NotImplementedError, match="meta"):
        module.to("meta")


@pytest.mark.skipif(not HAS_GPU, reason="no GPU that the package has code for")
def test_to_a_gpu_and_back() -> None:
    """The weights are prepared again from their canonical form."""
    module = prepared()
    wanted = run(module)
    module.to("cuda")
    assert "cuda" in repr(module)
    far = module(X.cuda(), ids=IDS.cuda(), weights=WEIGHTS.cuda()).cpu()
    assert (far.float() - wanted.float()).norm() < 4e-3 * wanted.float().norm()
    assert torch.equal(run(module.cpu()), wanted)


def test_it_prints_shapes_mode_and_bytes() -> None:
    """In the form of torch's modules."""
    text = repr(prepared())
    assert text.startswith("Moe(nvfp4_bf16, w1=[6, 128, 128], w2=[6, 128, 64], experts=6, top_k=2")
    assert f"{prepared().layer.weight_bytes:,} bytes on cpu" in text


@pytest.mark.parametrize("backend", ["none", "aot_eager"])
def test_gradients_are_refused(backend: str) -> None:
    """When one is asked for, and not before: parameters before a layer may require some."""
    module = prepared()
    call = run if backend == "none" else torch.compile(run, backend=backend, fullgraph=True)
    with torch.no_grad():
        wanted = call(module)
    linear = torch.nn.Linear(H, H, dtype=torch.bfloat16)

    def model() -> torch.Tensor:
        return module(linear(X), ids=IDS, weights=WEIGHTS)

    if backend != "none":
        model = torch.compile(model, backend=backend, fullgraph=True)
    out = model()
    assert out.requires_grad and torch.equal(run(module), wanted)
    with pytest.raises(NotImplementedError, match="torch: a layer has no gradient"):
        out.float().sum().backward()
    assert linear.weight.grad is None
    weights = WEIGHTS.clone().requires_grad_()
    with pytest.raises(NotImplementedError, match="no gradient"):
        module(X, ids=IDS, weights=weights).sum().backward()
    with pytest.raises(RuntimeError, match="out, workspace"):
        module(linear(X), ids=IDS, weights=WEIGHTS, out=torch.empty(T, H, dtype=torch.bfloat16))
    with torch.no_grad():
        assert not model().requires_grad


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_rows_are_rounded_once(dtype: torch.dtype) -> None:
    """To bfloat16, in modes that multiply such rows."""
    wide = torch.randn(T, H, generator=GENERATOR).to(dtype)
    module = prepared()
    wanted = module(wide.bfloat16(), ids=IDS, weights=WEIGHTS)
    assert torch.equal(module(wide, ids=IDS, weights=WEIGHTS), wanted)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    batch = compiled(wide.reshape(2, 5, H), ids=IDS.reshape(2, 5, K),
                     weights=WEIGHTS.reshape(2, 5, K))  # fmt: skip
    assert torch.equal(batch, wanted.reshape(2, 5, H))


@pytest.mark.parametrize("device", DEVICES)
def test_quantized_tensors_travel(device: str) -> None:
    """torch.save() and torch.load() as they are by default, to(), deepcopy()."""
    tensor = nf.quantize(W1.to(device), "nvfp4", batched=True)
    wanted = tensor.dequantize()
    file = io.BytesIO()
    torch.save({"w": tensor}, file)
    file.seek(0)
    again = torch.load(file)["w"]
    assert again.device == tensor.device and torch.equal(again.dequantize(), wanted)
    assert torch.equal(copy.deepcopy(tensor).dequantize(), wanted)
    assert tensor.to(tensor.device) is tensor and tensor.device.type == device
    host = tensor.to("cpu")
    assert torch.equal(host.dequantize(), wanted.cpu())
    numpy = nf.quantize(W1.numpy(), "nvfp4", batched=True).to(device)
    if device == "cuda":
        assert numpy.device.type == "cuda" and torch.equal(numpy.values, tensor.values)
    with pytest.raises(NotImplementedError, match="meta"):
        tensor.to("meta")


def test_meta_tensors_are_refused_by_name() -> None:
    """Without a backtrace of C++."""
    meta = torch.empty(4, 64, device="meta")
    calls = {"input": lambda: nf.quantize(meta, "mxfp8"),
             "w1": lambda: nf.MoeLayer.prepare(W1.bfloat16().to("meta"), W2.bfloat16().to("meta"),
                                               nf.MoeConfig(hidden=H, inter=I, experts=E, top_k=K)),
             "hidden": lambda: prepared().layer.run(X.to("meta"), ids=IDS.int(), weights=WEIGHTS),
             }  # fmt: skip
    for argument, call in calls.items():
        with pytest.raises(NotImplementedError, match=f"^{argument}: .*meta device") as caught:
            call()
        assert "\n" not in str(caught.value)
