"""nft.Linear: products of all modes, forms of inputs, state, gradients, torch.compile."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterator

import pytest

import narrowfloat as nf

torch = pytest.importorskip("torch", reason="torch is not installed; ./test.sh --with-torch")

import narrowfloat.torch as nft  # noqa: E402

N, K = 144, 256
HAS_GPU = torch.cuda.is_available() and nf.build_info()["cuda_enabled"]
DEVICES = ["cpu", "cuda"] if HAS_GPU else ["cpu"]
GENERATOR = torch.Generator().manual_seed(27)
W = torch.randn(N, K, generator=GENERATOR) / 8
BIAS = torch.randn(N, generator=GENERATOR)
X = torch.randn(130, K, generator=GENERATOR)
# Modes -> formats of weights and rows, and the largest distance from the product in fp64 of the
# numbers that these hold: sums are fp32, and one mode rounds the weights once more.
MODES = {"bf16": ("", "", 1e-6), "fp8_tensor": ("fp8_tensor", "static", 1e-6),
         "fp8_block": ("fp8_128x128", "fp8_1x128", 1e-6), "mxfp8": ("mxfp8", "mxfp8", 1e-6),
         "mxfp4_mxfp8": ("mxfp4", "mxfp8", 1e-6), "mxfp4_bf16": ("mxfp4", "", 1e-6),
         "mxfp4_fp8": ("mxfp4", "fp8_1x128", 1e-6), "nvfp4": ("nvfp4", "static", 1e-6),
         "nvfp4_per_token": ("nvfp4", "nvfp4_per_token", 1e-6), "nvfp4_bf16": ("nvfp4", "", 1e-6),
         "nvfp4_fp8_exact": ("nvfp4", "fp8_1x128", 1e-6),
         "nvfp4_fp8_rounded": ("nvfp4", "fp8_1x128", 0.03),
         "mxfp4_fp8_token": ("mxfp4", "fp8_token", 1e-6),
         "nvfp4_fp8_token": ("nvfp4", "fp8_token", 0.03),
         "mxfp4_int8": ("mxfp4", "int8", 1e-6), "nvfp4_int8": ("nvfp4", "int8", 1e-6)}  # fmt: skip
ON_FP8_CORES = ("fp8_tensor", "fp8_block", "mxfp4_fp8", "mxfp4_fp8_token")
MULTIPLIER = {"fp8_tensor": 64.0, "nvfp4": 512.0}


@pytest.fixture(autouse=True)
def forgets_compiled_code() -> Iterator[None]:
    """torch keeps few versions of a function, for all tests together."""
    yield
    torch._dynamo.reset()


def prepared(mode: str = "nvfp4_bf16", **options: object) -> nft.Linear:
    """A layer of W and BIAS."""
    given = {"bias": BIAS, "input_multiplier": MULTIPLIER.get(mode), **options}
    return nft.Linear.prepare(W, mode, **given)


def wanted(mode: str, rows: torch.Tensor) -> torch.Tensor:
    """The product in fp64 of the numbers that codes and scales hold."""
    weights, form, _ = MODES[mode]
    w = nf.quantize(W, weights).dequantize() if weights else W.bfloat16()
    if form == "static":
        m = MULTIPLIER[mode]
        x = (rows.float() * m).to(torch.float8_e4m3fn).double() / m if mode == "fp8_tensor" else \
            nf.quantize(rows, "nvfp4", encode_scale=m).dequantize().double()  # fmt: skip
    elif form == "fp8_token":
        m = (torch.full((), 448.0) / rows.float().abs().amax(dim=1))[:, None]
        x = (rows.float() * m).to(torch.float8_e4m3fn).double() * (torch.ones(()) / m).double()
    elif form == "int8":
        tiles = rows.bfloat16().float().reshape(len(rows), K // 32, 32)
        m = torch.full((), 127.0) / tiles.abs().amax(dim=2, keepdim=True)
        x = ((tiles * m).round().double() * (torch.ones(()) / m).double()).reshape(rows.shape)
    else:
        x = (nf.quantize(rows, form).dequantize() if form else rows.bfloat16()).double()
    return x @ w.double().T + BIAS.double()


def distance(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative to the norm."""
    return float((got.cpu().double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", list(MODES))
def test_products_of_all_modes(mode: str, device: str) -> None:
    """One row, part of a tile, two tiles; any leading axes and types of rows."""
    if MODES[mode][1] == "int8" and device != "cpu":
        with pytest.raises(nf.UnsupportedError, match="int8 rows run on the CPU only"):
            prepared(mode).to(device)
        return
    layer = prepared(mode).to(device)
    far = MODES[mode][2]
    if device != "cpu":
        # Tensor cores sum FP8 products in 14 bits between promotions.
        far = max(far, 1.5e-3 if mode in ON_FP8_CORES else 5e-5)
    for tokens in (1, 7, 130):
        x = X[:tokens]
        out = layer(x.to(device))
        assert out.dtype == torch.float32 and distance(out, wanted(mode, x)) < far
        for dtype, rounding in ((torch.bfloat16, 4e-3), (torch.float16, 5e-4)):
            got = layer(x.to(device, dtype))
            assert got.dtype == dtype and got.shape == (tokens, N)
            assert distance(got, wanted(mode, x.to(dtype))) < far + rounding
    batch = layer(X.to(device).reshape(2, 5, 13, K))
    assert torch.equal(batch.reshape(130, N), layer(X.to(device)))
    assert torch.equal(layer(X[0].to(device)), layer(X[:1].to(device))[0])
    for dtype in (torch.float32, torch.bfloat16):
        whole = X.to(device, dtype)
        shifted = torch.cat([whole.new_zeros(1), whole.reshape(-1)])[1:].reshape(130, K)
        for view in (whole.repeat(1, 2)[:, K:], whole.T.contiguous().T, shifted):
            assert torch.equal(layer(view), layer(whole))
    assert layer(X[:0].to(device)).shape == (0, N)


def test_a_weight_that_is_quantized_already() -> None:
    """The same layer, from either scale layout, with and without bias."""
    x = X.bfloat16()
    for layout in ("linear", "swizzled_128x4"):
        made = nf.quantize(W, "nvfp4", layout=layout)
        assert torch.equal(prepared()(x), nft.Linear.prepare(made, "nvfp4_bf16", bias=BIAS)(x))
    plain = nft.Linear.prepare(W, "nvfp4_bf16")
    assert distance(plain(X) + BIAS, prepared()(X).double()) < 1e-6
    square = torch.randn(256, 256, generator=torch.Generator().manual_seed(1))
    fast, exact = (nft.Linear.prepare(square, "fp8_block", math=math).state_dict()["weight_scales"]
                   for math in ("fast", "exact"))  # fmt: skip
    assert torch.equal(fast, nf.quantize(square, "fp8_128x128", math="fast").scales)
    assert not torch.equal(fast, exact)


@pytest.mark.parametrize("mode", ["bf16", "fp8_tensor", "fp8_block", "nvfp4"])
def test_states_keep_every_bit(mode: str) -> None:
    """state_dict(), files of torch, pickle, deepcopy: the same layer."""
    layer = prepared(mode)
    out = layer(X)
    state = layer.state_dict()
    other = prepared(mode, bias=-BIAS)
    assert not torch.equal(other(X), out)
    assert other.load_state_dict(state).missing_keys == [] and torch.equal(other(X), out)
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    assert torch.equal(nft.Linear.of_state(torch.load(file))(X), out)
    assert torch.equal(pickle.loads(pickle.dumps(layer))(X), out)
    again = copy.deepcopy(layer)
    assert torch.equal(again(X), out) and again.layer is layer.layer
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), layer)
    assert {"0.weight", "1.config", "1.weight", "1.bias"} <= model.state_dict().keys()
    with pytest.raises(RuntimeError, match=r"expected a Linear of \[16, 256\], got \[144, 256\]"):
        nft.Linear.prepare(W[:16], "bf16").load_state_dict(state)
    with pytest.raises(RuntimeError, match="config: no configuration of a Linear"):
        other.load_state_dict({**state, "config": torch.zeros(2, dtype=torch.uint8)})
    with pytest.raises(RuntimeError, match="weight: missing in the state of a Linear"):
        other.load_state_dict({"config": state["config"]})
    for name, part in (("weight", slice(16)), ("weight", 0), ("bias", slice(9)), ("bias", 0)):
        with pytest.raises(RuntimeError, match=f"{name}: .*expected"):
            other.load_state_dict({**state, name: state[name][part]})
    for before, after in ((f'"mode": "{mode}"', '"mode": "fp3"'),
                          ('"multiplier": ', '"multiplier": -')):
        text = bytes(state["config"].tolist()).decode().replace(before, after).encode()
        config = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        with pytest.raises(RuntimeError, match=r"(mode|input_multiplier): expected"):
            other.load_state_dict({**state, "config": config})
    assert torch.equal(other(X), out)


def test_what_is_not_kept_cannot_be_saved_or_moved() -> None:
    """The message says how it can."""
    layer = prepared(keep=False)
    assert layer.kept_bytes == 0 and prepared().kept_bytes == N * (K // 2 + K // 16 + 4)
    with pytest.warns(UserWarning, match="keep=True"):
        assert not layer.state_dict()
    for call in (lambda: pickle.dumps(layer), lambda: layer.to("meta")):
        with pytest.raises(RuntimeError, match=r"Linear\.prepare\(\.\.\., keep=True\)"):
            call()
    with pytest.raises(NotImplementedError, match="meta device"):
        prepared().to("meta")
    assert torch.equal(layer.to(torch.float16)(X), prepared()(X))


def test_it_prints_mode_shape_and_bytes() -> None:
    """In the form of torch's modules."""
    layer = prepared()
    assert repr(layer) == (f"Linear(nvfp4_bf16, in_features=256, out_features=144, bias=True, "
                           f"{layer.layer.bytes:,} bytes on cpu)")  # fmt: skip
    assert 0.5625 <= layer.layer.bytes / (N * K) < 0.75
    assert not list(layer.parameters()) and (layer.in_features, layer.out_features) == (K, N)


@pytest.mark.parametrize("device", DEVICES)
def test_compiled_code_and_gradients(device: str) -> None:
    """One graph, with symbolic extents; a gradient is refused when one is asked for."""
    layer = prepared().to(device)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
    with torch.no_grad():
        for tokens in (3, 9, 130):
            x = X[:tokens].to(device)
            assert torch.equal(compiled(x), layer(x))
    before = torch.nn.Linear(K, K).to(device)
    for call in (layer, compiled):
        out = call(before(X.to(device)))
        assert out.requires_grad
        with pytest.raises(NotImplementedError, match="a layer has no gradient"):
            out.sum().backward()
    assert before.weight.grad is None


@pytest.mark.skipif(not HAS_GPU, reason="no GPU that the package has code for")
@pytest.mark.parametrize("tokens", [1, 100, 130])
def test_cuda_graphs(tokens: int) -> None:
    """Captured by hand and by torch.compile; nothing of a call outlives it."""
    layer, x = prepared().to("cuda"), X[:tokens].to("cuda", torch.bfloat16)
    expected = layer(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(x)
    x.copy_(x.flip(0))
    graph.replay()
    assert torch.equal(out, expected.flip(0))
    compiled = torch.compile(layer, mode="reduce-overhead")
    with torch.no_grad():
        for _ in range(3):
            torch.compiler.cudagraph_mark_step_begin()
            got = compiled(x).clone()
    assert torch.equal(got, expected.flip(0))
    assert torch.equal(layer.cpu()(x.cpu()), prepared()(x.cpu()))


def test_errors_name_the_argument() -> None:
    """They say what was expected, and what came."""
    layer, quantized = prepared(), nf.quantize(W, "mxfp4")
    calls = {
        r"input: expected \[\.\.\., 256\], got \[2, 8\]": lambda: layer(torch.zeros(2, 8)),
        "input: expected float32, .*int64": lambda: layer(torch.zeros(2, K, dtype=torch.int64)),
        "mode: expected one of bf16, .*'fp3'": lambda: nft.Linear.prepare(W, "fp3"),
        "weight: mode nvfp4_bf16 multiplies nvfp4 weights, got mxfp4":
            lambda: nft.Linear.prepare(quantized, "nvfp4_bf16"),
        r"weight: expected \[out_features, in_features\], got \[2, 8, 8\]":
            lambda: nft.Linear.prepare(torch.zeros(2, 8, 8), "bf16"),
        "weight: .*multiples of 16": lambda: nft.Linear.prepare(W[:9], "nvfp4_bf16"),
        "weight: fp8_block needs columns in multiples of 128":
            lambda: nft.Linear.prepare(W[:, :64].contiguous(), "fp8_block"),
        r"bias: expected \[144\], got \[9\]": lambda: prepared(bias=BIAS[:9]),
        "input_multiplier: mode nvfp4 has static": lambda: nft.Linear.prepare(W, "nvfp4"),
        "input_multiplier: mode mxfp8 has none":
            lambda: nft.Linear.prepare(W, "mxfp8", input_multiplier=2.0),
        "input_multiplier: expected a finite": lambda: prepared("nvfp4", input_multiplier=-1.0),
        "columns: expected": lambda: torch.ops.narrowfloat.linear(X, layer._handle.number, 5),
        "number 5 is of no layer": lambda: torch.ops.narrowfloat.linear(X, 5, N),
    }  # fmt: skip
    for message, call in calls.items():
        with pytest.raises(ValueError, match=f"^(layer: )?{message}"):
            call()
    with pytest.raises(NotImplementedError, match="meta device"):
        nft.Linear.prepare(W.to("meta"), "bf16")
