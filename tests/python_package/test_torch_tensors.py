"""Tensors of torch in and out, on the CPU: the bytes of NumPy arrays, results as tensors."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import narrowfloat as nf

torch = pytest.importorskip("torch", reason="torch is not installed; ./test.sh --with-torch")

X = np.random.default_rng(7).standard_normal((6, 128)).astype(np.float32)
TYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def tensor(array: np.ndarray) -> torch.Tensor:
    """The same bytes as a tensor."""
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def content(value: torch.Tensor) -> bytes:
    """Bytes of a tensor."""
    return value.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", TYPES)
def test_every_format(dtype: str) -> None:
    """Quantize, relayout and dequantize."""
    array = X.astype(TYPES[dtype])
    for info in nf.formats():
        wanted, got = nf.quantize(array, info.name), nf.quantize(tensor(array), info.name)
        assert isinstance(got.values, torch.Tensor) and got.values.dtype == torch.uint8
        assert content(got.values) == wanted.values.tobytes()
        assert content(got.scales) == wanted.scales.tobytes()
        if wanted.global_scale is not None:
            assert content(got.global_scale) == wanted.global_scale.tobytes()
        restored = got.dequantize(getattr(torch, dtype))
        assert restored.dtype == getattr(torch, dtype)
        assert content(restored) == wanted.dequantize(dtype).tobytes()
        assert content(got.dequantize()) == wanted.dequantize().tobytes()
        layout = info.layouts[0]
        assert content(got.relayout(layout).scales) == wanted.relayout(layout).scales.tobytes()


def test_options_and_outputs() -> None:
    """Vectors among the options, preallocated outputs, float8 input, other operations."""
    x = tensor(X.astype(ml_dtypes.bfloat16))
    scales = torch.full((6,), 300.0)
    wanted = nf.quantize(X.astype(ml_dtypes.bfloat16), "nvfp4", encode_scale=scales.numpy())
    out = nf.QuantizedTensor.empty(x.shape, "nvfp4", global_scale_axis="row", like=x)
    assert nf.quantize(x, out=out, encode_scale=scales) is out
    assert content(out.values) == wanted.values.tobytes()
    target = torch.empty(6, 128, dtype=torch.float16)
    assert nf.dequantize(out, out=target) is target
    assert content(target) == wanted.dequantize("float16").tobytes()
    assert content(nf.amax(x, per_row=True)) == nf.amax(X.astype(ml_dtypes.bfloat16),
                                                        per_row=True).tobytes()  # fmt: skip
    codes = x.to(torch.float8_e4m3fn)
    same = codes.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn)
    wanted = nf.quantize(same, "mxfp4")
    assert content(nf.quantize(codes, "mxfp4").values) == wanted.values.tobytes()
    weight, residual = x[0].clone(), x.clone()
    q = nf.add_rmsnorm_quantize(x, residual, weight, "mxfp8")
    assert isinstance(q.scales, torch.Tensor) and not torch.equal(residual, x)


def test_parameters_slices_and_files(tmp_path) -> None:
    """Tensors that want gradients, rows of any stride; a file of tensors."""
    parameter = torch.nn.Parameter(tensor(X))
    q = nf.quantize(parameter, "nvfp4")
    assert not q.values.requires_grad
    half = nf.quantize(tensor(X)[::2], "nvfp4")
    assert content(half.values) == nf.quantize(X[::2], "nvfp4").values.tobytes()
    q.save(tmp_path / "q")
    assert nf.QuantizedTensor.load(tmp_path / "q").values.tobytes() == content(q.values)
    assert nf.diff(parameter, q).mse == nf.diff(X, q.dequantize().numpy()).mse


def test_moe_layer() -> None:
    """The same layer from tensors and from arrays."""
    rng = np.random.default_rng(3)
    w1 = rng.standard_normal((4, 256, 128)).astype(ml_dtypes.bfloat16)
    w2 = rng.standard_normal((4, 128, 128)).astype(ml_dtypes.bfloat16)
    logits = rng.standard_normal((6, 4)).astype(np.float32)
    config = nf.MoeConfig(hidden=128, inter=128, experts=4, top_k=2, mode="nvfp4_bf16")
    x = X.astype(ml_dtypes.bfloat16)
    arrays = nf.MoeLayer.prepare(*(nf.quantize(w, "nvfp4", batched=True) for w in (w1, w2)), config)
    tensors = nf.MoeLayer.prepare(
        *(nf.quantize(tensor(w), "nvfp4", batched=True) for w in (w1, w2)), config
    )
    out = tensors.run(tensor(x), tensor(logits))
    assert out.dtype == torch.bfloat16
    assert content(out) == arrays.run(x, logits).tobytes()
    assert isinstance(arrays.run(tensor(x), tensor(logits)), torch.Tensor)
    ids, weights = nf.route(tensor(logits), top_k=2)
    assert content(tensors.run(tensor(x), ids=ids, weights=weights)) == content(out)
    assert nf.permute(ids, local_experts=4).slot_to_row.dtype == torch.int32


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda x: nf.quantize(x.double(), "nvfp4"), "input"),
        (lambda x: nf.quantize(x.long(), "nvfp4"), "input"),
        (lambda x: nf.quantize(x[:, ::2], "nvfp4"), "input"),
        (lambda x: nf.quantize(x.reshape(24, 32).t()[:, :16], "nvfp4"), "input"),
        (lambda x: nf.quantize(x, "nvfp4").dequantize(torch.int8), "out"),
        (lambda x: nf.quantize(x.to(torch.complex64), "nvfp4"), "input"),
    ],
)
def test_value_errors(call, word: str) -> None:
    """As for arrays."""
    with pytest.raises(ValueError, match=word):
        call(tensor(X))


def test_meta_tensors_have_no_memory() -> None:
    """A device that is neither CPU nor CUDA."""
    with pytest.raises((NotImplementedError, RuntimeError, ValueError, BufferError)):
        nf.quantize(torch.empty(4, 64, device="meta"), "nvfp4")
