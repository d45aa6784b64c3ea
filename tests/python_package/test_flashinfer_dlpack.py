"""narrowfloat.compat.flashinfer: arrays that neither NumPy nor torch made, through DLPack."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import narrowfloat.compat.flashinfer as fi

BF16, E4M3, E8M0 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu
# Codes of element types in DLPack's header.
TYPES = {"int32": 0, "uint8": 1, "float32": 2, "float16": 2, "bfloat16": 4, "bool": 6,
         "float8_e4m3fn": 10, "float8_e5m2": 12, "float8_e8m0fnu": 14}  # fmt: skip
READ_ONLY = 1  # A flag of the new form.


class Tensor(ctypes.Structure):
    """DLTensor."""

    _fields_ = (("data", ctypes.c_void_p), ("device", ctypes.c_int32 * 2),
                ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8),
                ("lanes", ctypes.c_uint16), ("shape", ctypes.POINTER(ctypes.c_int64)),
                ("strides", ctypes.POINTER(ctypes.c_int64)),
                ("byte_offset", ctypes.c_uint64))  # fmt: skip


class Managed(ctypes.Structure):
    """DLManagedTensor, without a deleter."""

    _fields_ = (("tensor", Tensor), ("manager", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class Versioned(ctypes.Structure):
    """DLManagedTensorVersioned, without a deleter."""

    _fields_ = (("version", ctypes.c_uint32 * 2), ("manager", ctypes.c_void_p),
                ("deleter", ctypes.c_void_p), ("flags", ctypes.c_uint64),
                ("tensor", Tensor))  # fmt: skip


_new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p,
                                 ctypes.c_void_p)(("PyCapsule_New", ctypes.pythonapi))


class Foreign:
    """Memory of an array that tells of itself through DLPack alone."""

    def __init__(self, array: np.ndarray, flags: int = 0, device: tuple[int, int] = (1, 0),
                 code: int | None = None) -> None:  # fmt: skip
        self.array, self.flags, self.device = array, flags, device
        self.code = TYPES[array.dtype.name] if code is None else code
        self.kept: list[Any] = []  # Objects that capsules point to.

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, **options: Any) -> Any:
        extents = (ctypes.c_int64 * self.array.ndim)(*self.array.shape)
        steps = (ctypes.c_int64 * self.array.ndim)(
            *(step // self.array.itemsize for step in self.array.strides)
        )
        tensor = Tensor(self.array.ctypes.data, self.device, self.array.ndim, self.code,
                        8 * self.array.itemsize, 1, extents, steps, 0)  # fmt: skip
        if options.get("max_version"):
            managed: Any = Versioned((1, 0), None, None, self.flags, tensor)
            name = b"dltensor_versioned"
        else:
            managed, name = Managed(tensor, None, None), b"dltensor"
        self.kept.append((managed, extents, steps, name))
        return _new_capsule(ctypes.addressof(managed), name, None)


class Old(Foreign):
    """Knows no keywords, as before DLPack had versions."""

    def __dlpack__(self) -> Any:
        return super().__dlpack__()


PRODUCERS = [Foreign, Old]
RNG = np.random.default_rng(8)


def example(*shape: int) -> np.ndarray:
    """Numbers of a normal distribution."""
    return RNG.standard_normal(shape).astype(np.float32)


def same(parts: Any, others: Any) -> bool:
    """Results of two calls: types and bytes."""
    pairs = list(zip(parts, others, strict=True))
    return all(a.dtype == b.dtype and a.tobytes() == b.tobytes() for a, b in pairs)


@pytest.mark.parametrize("producer", PRODUCERS)
@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16, E4M3])
def test_inputs(producer: type, dtype: Any) -> None:
    """Give what arrays of NumPy give, by position and by keyword, types that NumPy lacks too."""
    x, scale = example(4, 64).astype(dtype), np.full(1, 300, np.float32)
    wanted = fi.fp4_quantize(x, scale)
    assert same(fi.fp4_quantize(producer(x), producer(scale)), wanted)
    assert same(fi.fp4_quantize(global_scale=producer(scale), input=producer(x)), wanted)
    assert isinstance(wanted[0], np.ndarray)


@pytest.mark.parametrize("producer", PRODUCERS)
def test_functions(producer: type) -> None:
    """Quantizers, decoders, layouts, bits, caches."""
    x, mask = example(2, 32, 128).astype(BF16), np.array([32, 7], np.int32)
    each, weight = np.full(2, 300, np.float32), example(128).astype(BF16)
    codes, scales = fi.mxfp4_quantize(x[0])
    cache = fi.nvfp4_kv_quantize(x[0], 0.5)
    sf = RNG.integers(0, 255, (128, 8)).astype(np.uint8).view(E8M0)
    bits = RNG.integers(0, 2, 37).astype(bool)
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (fi.scaled_fp4_grouped_quantize, (x, mask, each)),
        (fi.mxfp8_grouped_quantize, (x, mask)),
        (fi.nvfp4_quantize_smooth, (x[0], weight, each[:1])),
        (fi.rmsnorm_fp4quant, (x[0], weight)),
        (fi.per_token_group_quant_8bit, (x[0], 32)),
        (fi.nvfp4_kv_quantize, (x[0], np.full(1, 0.5, np.float32))),
        (lambda *args: [fi.mxfp4_dequantize(*args)], (codes, scales)),
        (lambda *args: [fi.nvfp4_kv_dequantize(*args, 0.5)], cache),
        (lambda *args: [fi.shuffle_matrix_a(*args, 128)], (x[0],)),
        (lambda *args: [fi.shuffle_matrix_sf_a(*args, 128)], (sf,)),
        (lambda *args: [fi.packbits(*args)], (bits,)),
        (lambda *args: [fi.make_nvfp4_global_scale(*args, False)], (x[0],)),
    ]
    for function, args in calls:
        foreign = [producer(arg) if isinstance(arg, np.ndarray) else arg for arg in args]
        assert same(function(*foreign), function(*args))


def test_outputs() -> None:
    """Are written in place; memory that is not to be written is refused before anything is."""
    x, weight = example(4, 64).astype(BF16), np.ones(64, BF16)
    codes, scales = np.zeros((4, 32), np.uint8), np.zeros((4, 4), np.uint8)
    sums, wanted = np.zeros_like(x), fi.rmsnorm_fp4quant(x, weight)
    found = fi.add_rmsnorm_fp4quant(Foreign(x), Foreign(sums), Foreign(weight), Foreign(codes),
                                    Foreign(scales))  # fmt: skip
    wanted = wanted[0], wanted[1].view(np.uint8)  # New scales are typed, given ones as they are.
    assert same((codes, scales), wanted) and same(found, wanted)
    assert sums.tobytes() == x.tobytes()
    sums[:] = 0
    with pytest.raises(ValueError, match="^y_fp4: .*read-only"):
        fi.add_rmsnorm_fp4quant(x, Foreign(sums), weight, Foreign(codes, READ_ONLY))
    assert not sums.astype(np.float32).any()


def test_members_of_pairs() -> None:
    """Caches come as a pair of arrays."""
    k = example(3, 2, 32).astype(np.float16)
    slots = np.arange(3)
    TYPES[slots.dtype.name] = 0

    def filled(made: Any) -> list[np.ndarray]:
        parts = [np.zeros((2, 4, 2, width), np.uint8) for width in (16, 16, 2, 2)]
        arrays = [made(part) for part in parts]
        fi.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(
            made(k), made(k), made(slots), tuple(arrays[:2]), arrays[2:], 0.5, 0.5
        )
        return parts

    assert same(filled(Foreign), filled(lambda array: array)) and filled(Foreign)[0].any()


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A TypeError that names the argument: other types, other devices, a GPU without torch."""
    x = example(4, 64)
    with pytest.raises(TypeError, match="^input: expected integers, bool, float32.*Foreign"):
        fi.fp4_quantize(Foreign(x, code=17), 1.0)
    with pytest.raises(TypeError, match="^a: expected memory of the CPU.*device type 7; copy it"):
        fi.mxfp4_quantize(Foreign(x, device=(7, 0)))
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(TypeError, match="^global_scale: Foreign lies on cuda:1.*import torch"):
        fi.fp4_quantize(x, Foreign(x[0, :1], device=(2, 1)))


def test_without_ml_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    """bfloat16 is its bits then, as everywhere."""
    x = example(4, 64).astype(BF16)
    wanted = fi.mxfp4_quantize(x)
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    assert same(fi.mxfp4_quantize(Foreign(x)), wanted)
    with pytest.raises(TypeError, match="^a: .*float8_e5m2 needs ml_dtypes"):
        fi.mxfp4_quantize(Foreign(x.astype(ml_dtypes.float8_e5m2)))


def test_tensors_of_torch_that_hide() -> None:
    """bfloat16 of torch on the CPU, seen through DLPack alone, gives arrays of NumPy."""
    torch = pytest.importorskip("torch")

    class Hidden:
        def __init__(self, tensor: Any) -> None:
            self.tensor = tensor

        def __dlpack__(self, **options: Any) -> Any:
            return self.tensor.__dlpack__(**options)

        def __dlpack_device__(self) -> Any:
            return self.tensor.__dlpack_device__()

    x = torch.from_numpy(example(4, 64)).to(torch.bfloat16)
    wanted = fi.mxfp4_quantize(x)
    found = fi.mxfp4_quantize(Hidden(x))
    assert all(isinstance(part, np.ndarray) for part in found)
    assert same(found, [part.numpy() for part in wanted])
    assert x.dtype == torch.bfloat16 and x.__dlpack_device__()[0] == 1
    if not torch.cuda.is_available():
        return
    on_gpu = fi.mxfp4_quantize(Hidden(x.cuda()))
    assert on_gpu[0].is_cuda and same([part.cpu().numpy() for part in on_gpu], found)


def test_layers_and_routers() -> None:
    """Every array of a call, the outputs among them."""
    rng = np.random.default_rng(7)
    logits = rng.standard_normal((3, 4)).astype(np.float32)
    x = rng.standard_normal((3, 128)).astype(BF16)
    w1 = rng.standard_normal((4, 256, 128)).astype(BF16)
    w2 = rng.standard_normal((4, 128, 128)).astype(BF16)
    options = {"num_experts": 4, "top_k": 2, "n_group": None, "topk_group": None,
               "intermediate_size": 128, "local_expert_offset": 0, "local_num_experts": 4,
               "routing_method_type": 1, "use_shuffled_weight": False,
               "weight_layout": 0}  # fmt: skip
    wanted = fi.trtllm_bf16_moe(logits, None, x, w1, w2, **options)
    out = np.zeros((3, 128), BF16)
    fi.trtllm_bf16_moe(*(Foreign(array) if array is not None else None
                         for array in (logits, None, x, w1, w2)), **options,
                       output=Foreign(out))  # fmt: skip
    assert out.tobytes() == wanted.tobytes()
    ids, values = np.zeros((3, 2), np.int32), np.zeros((3, 2), np.float32)
    bias = np.zeros(4, np.float32)
    fi.fused_topk_deepseek(Foreign(logits), Foreign(bias), 1, 1, 2, 1.0, Foreign(values),
                           Foreign(ids))  # fmt: skip
    again = np.zeros_like(ids), np.zeros_like(values)
    fi.fused_topk_deepseek(logits, bias, 1, 1, 2, 1.0, again[1], again[0])
    assert ids.tobytes() == again[0].tobytes() and values.any()
    assert values.tobytes() == again[1].tobytes()
    picked, weights = np.zeros((3, 2), np.int32), np.ones((3, 2), np.float32)
    (mixed,) = fi.cutlass_fused_moe(*map(Foreign, (x, picked, weights, w1, w2)), "bfloat16", None)
    (plain,) = fi.cutlass_fused_moe(x, picked, weights, w1, w2, "bfloat16", None)
    assert mixed.tobytes() == plain.tobytes()
