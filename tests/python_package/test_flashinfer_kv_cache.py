"""narrowfloat.compat.flashinfer: KV caches, through FlashInfer's shapes and the model's bytes."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from flashinfer_table import BITS, record
from test_flashinfer_quantizers import LIBRARIES
from test_kv_cache import model, paged, reordered, sample, token

import narrowfloat as nf
import narrowfloat.compat.flashinfer as fi

D = np.array([0.37], np.float32)


@pytest.fixture(params=LIBRARIES, ids=lambda lib: lib.__name__)
def lib(request: pytest.FixtureRequest) -> Any:
    """Where arrays come from."""
    return request.param


@pytest.mark.parametrize("math", ["exact", "fast"])
def test_rows(lib: Any, math: str) -> None:
    """There with the bytes of the model, and back."""
    x = sample((7, 64), 1)
    codes, scales = fi.nvfp4_kv_quantize(lib.make(x), lib.make(D), math=math)
    wanted = model(x, float(D[0]), "kv_quantize", math)
    assert (lib.raw(codes), lib.raw(scales)) == (wanted[0].tobytes(), wanted[1].tobytes())
    assert str(codes.dtype).endswith("uint8") and str(scales.dtype).endswith("uint8")
    back = fi.nvfp4_kv_dequantize(codes, scales, lib.make(D))
    assert str(back.dtype).endswith("bfloat16")
    assert lib.raw(back) == nf.kv_dequantize(*wanted, float(D[0])).tobytes()
    record("nvfp4_kv_quantize", BITS)
    record("nvfp4_kv_dequantize", BITS)


@pytest.mark.parametrize("order", ["NHD", "HND"])
@pytest.mark.parametrize("stacked", [False, True])
def test_appending_and_gathering(lib: Any, order: str, stacked: bool) -> None:
    """Both ways of appending write the same; gathering gives what was written."""
    pages, tokens, heads, dim = 4, 4, 2, 32
    key, value = (sample((5, heads, dim), seed) for seed in (2, 3))
    batches = np.array([0, 0, 1, 1, 1], np.int32)
    positions = np.array([0, 5, 0, 1, 9], np.int32)
    indices, indptr = np.array([3, 1, 0], np.int32), np.array([0, 2, 3], np.int32)
    slots = np.array([12, 5, 0, 1, -1], np.int64)

    def empty(width: int, dtype: Any) -> Any:
        shape = paged(order, pages, tokens, heads, width)
        if stacked:
            return lib.make(np.zeros((pages, 2, *shape[1:]), dtype))
        return tuple(lib.make(np.zeros(shape, dtype)) for _ in range(2))

    def filled(by_slots: bool) -> tuple[Any, Any]:
        cache, scales = empty(dim // 2, np.uint8), empty(dim // 16, ml_dtypes.float8_e4m3fn)
        rows = lib.make(key), lib.make(value)
        if by_slots:
            fi.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(
                *rows, lib.make(slots), cache, scales, 0.5, lib.make(D), kv_layout=order
            )
        else:
            fi.nvfp4_quantize_append_paged_kv_cache(
                *rows, lib.make(batches), lib.make(positions), cache, scales, lib.make(indices),
                lib.make(indptr), None, 0.5, lib.make(D), kv_layout=order,
            )  # fmt: skip
        return cache, scales

    cache, scales = filled(True)
    for part, other in zip((cache, scales), filled(False), strict=True):
        for one, two in zip(part, other, strict=True):
            assert lib.raw(one) == lib.raw(two)
    halves = [cache[:, 0], cache[:, 1]] if stacked else list(cache)
    for numbers, codes, d in ((key, halves[0], 0.5), (value, halves[1], float(D[0]))):
        shape = paged(order, pages, tokens, heads, dim // 2)
        raw = np.frombuffer(lib.raw(codes), np.uint8).reshape(shape)
        for row, page, entry in ((0, 3, 0), (1, 1, 1), (2, 0, 0), (3, 0, 1)):
            wanted = model(numbers[row], d, "kv_append", "fast")[0]
            np.testing.assert_array_equal(token(raw, order, page, entry), wanted)
    out = [lib.make(np.full((2, 3, heads, dim), 7, np.float16)) for _ in range(2)]
    tables = lib.make(np.array([[3, 1], [0, 0]], np.int32))
    fi.nvfp4_kv_dequantize_paged(cache, scales, tables, lib.make(np.array([1, 2], np.int32)), 0.5,
                                 lib.make(D), *out, kv_layout=order)  # fmt: skip
    for numbers, found, d in ((key, out[0], 0.5), (value, out[1], float(D[0]))):
        wanted = np.full((2, 3, heads, dim), 7, np.float16)
        for row, at in ((0, (0, 0)), (2, (1, 0)), (3, (1, 1))):
            wanted[at] = nf.kv_dequantize(*model(numbers[row], d, "kv_append", "fast"), d,
                                          np.float16)  # fmt: skip
        assert lib.raw(found) == wanted.tobytes()
    for name in ("nvfp4_kv_dequantize_paged", "nvfp4_quantize_append_paged_kv_cache",
                 "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping"):  # fmt: skip
        record(name, BITS, "rows that lead nowhere are skipped")


@pytest.mark.parametrize("order", ["NHD", "HND"])
def test_whole_caches(lib: Any, order: str) -> None:
    """Scales in e4m3, those of V reordered; decode scales as numbers."""
    random = np.random.default_rng(4)
    shape = paged(order, 2, 8, 3, 64)
    key, value = (random.standard_normal(shape).astype(np.float16) for _ in range(2))
    given = np.array([300], np.float32)
    codes, scales, k_decode, v_decode = fi.nvfp4_quantize_paged_kv_cache(
        lib.make(key), lib.make(value), order, v_global_sf=lib.make(given)
    )
    encodes = (np.float32(448) / np.abs(key).max().astype(np.float32), given[0])
    for i, (numbers, decode) in enumerate(((key, k_decode), (value, v_decode))):
        assert isinstance(decode, float) and decode == np.float32(1) / encodes[i]
        q = nf.quantize(numbers, "nvfp4", layout="linear", encode_scale=float(encodes[i]),
                        math="fast")  # fmt: skip
        plain = np.asarray(q.scales).view(np.uint8).reshape(*shape[:3], 4)
        assert lib.raw(codes[i]) == q.values.tobytes()
        assert lib.raw(scales[i]) == (reordered(plain, order) if i else plain).tobytes()
        assert str(scales[i].dtype).endswith("float8_e4m3fn")
    again = fi.nvfp4_quantize_paged_kv_cache(
        lib.make(key), lib.make(value), order, k_decode, float(given[0])
    )
    assert again[2:] == (np.float32(1) / np.float32(k_decode), v_decode)
    record("nvfp4_quantize_paged_kv_cache", BITS,
           "waits for the GPU unless scales are given as numbers: two results are numbers")


def test_heads_of_two_sizes(lib: Any) -> None:
    """Keys and values may differ in their last axis."""
    wide, narrow = sample((2, 4, 2, 64), 5), sample((2, 4, 2, 32), 6)
    halves = [nf.quantize(part, "nvfp4", layout="linear", encode_scale=1.0)
              for part in (wide, narrow)]  # fmt: skip
    codes = tuple(lib.make(q.values) for q in halves)
    scales = tuple(lib.make(q.scales.reshape(*q.values.shape[:-1], -1)) for q in halves)
    outs = [lib.make(np.zeros((1, 8, 2, size), np.float32)) for size in (64, 32)]
    fi.nvfp4_kv_dequantize_paged(codes, scales, lib.make(np.array([[1, 0]], np.int64)),
                                 lib.make(np.array([7], np.int32)), 1.0, 1.0, *outs)  # fmt: skip
    for q, out in zip(halves, outs, strict=True):
        back = q.dequantize()[[1, 0]].reshape(1, 8, 2, -1).copy()
        back[:, 7:] = 0
        assert lib.raw(out) == back.tobytes()


@pytest.mark.parametrize("scale", [0.0, -1.0, np.nan, np.inf])
def test_decode_scales_that_are_none(lib: Any, scale: float) -> None:
    """As numbers and as arrays, on a GPU as well: nothing is written."""
    appends = (fi.nvfp4_quantize_append_paged_kv_cache,
               fi.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping)  # fmt: skip
    for call in appends:
        given = {name: lib.make(value.copy()) if isinstance(value, np.ndarray) else value
                 for name, value in CALLS[call].items()}  # fmt: skip
        for bad in (scale, lib.make(np.float32([scale])), np.float32([scale])):
            for name in ("k_scale", "v_scale"):
                with pytest.raises(ValueError, match=f"^{name}: .*positive finite global decode"):
                    call(**given | {name: bad})
        assert not any(lib.raw(given["paged_kv_cache"])) and not any(lib.raw(given["kv_cache_sf"]))


def test_where_scales_and_indices_lie(lib: Any) -> None:
    """A float, an array of the CPU and one beside the caches give the same; so do wide indices."""
    found = []
    for make in (lambda value: value, lambda value: np.float32([value]),
                 lambda value: lib.make(np.float32([value]))):  # fmt: skip
        for kind in (np.int32, np.int64):
            given = {name: lib.make(np.zeros_like(value) if "cache" in name else value.copy())
                     if isinstance(value, np.ndarray) else value
                     for name, value in APPEND.items()}  # fmt: skip
            for name in ("batch_indices", "positions", "kv_indices", "kv_indptr"):
                numbers = np.array([0, 4] if name == "kv_indptr" else range(4), kind)
                given[name] = lib.make(numbers * (name != "batch_indices"))
            rows = {name: given[name][:4] for name in ("append_key", "append_value")}
            fi.nvfp4_quantize_append_paged_kv_cache(
                **given | rows | {"k_scale": make(0.01), "v_scale": make(0.02)})  # fmt: skip
            found.append(lib.raw(given["paged_kv_cache"]) + lib.raw(given["kv_cache_sf"]))
    assert any(found[0]) and found == found[:1] * 6


def test_scales_under_capture(lib: Any) -> None:
    """Slots take scales of the GPU alone while a graph is captured."""
    if lib.__name__ != "Cuda":
        pytest.skip("needs a GPU")
    import torch

    given = {name: lib.make(value.copy()) if isinstance(value, np.ndarray) else value
             for name, value in SLOTS.items()}  # fmt: skip
    with pytest.raises(ValueError, match="during CUDA graph capture"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            fi.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(**given)


K, V = (sample((5, 2, 32), seed) for seed in (2, 3))
CODES, FACTORS = np.zeros((4, 2, 4, 2, 16), np.uint8), np.zeros((4, 2, 4, 2, 2), np.uint8)
PLACES = np.zeros(5, np.int32)
OUT = np.zeros((2, 3, 2, 32), np.float16)
PAGED = {"paged_kv_cache": CODES, "kv_cache_sf": FACTORS, "k_scale": 1.0, "v_scale": 1.0}
SLOTS = {"append_key": K, "append_value": V, "slot_mapping": PLACES, **PAGED}
APPEND = {"append_key": K, "append_value": V, "batch_indices": PLACES, "positions": PLACES,
          "kv_indices": PLACES, "kv_indptr": PLACES, "kv_last_page_len": None, **PAGED}
GATHER = {"block_tables": np.zeros((2, 2), np.int32), "seq_lens": np.ones(2, np.int32),
          "output_k": OUT, "output_v": OUT.copy(), **PAGED}  # fmt: skip
WHOLE = {"k_cache": np.ones((2, 3, 8, 64), np.float16), "v_cache": np.ones((2, 3, 8, 64), "f2")}
ROWS = {"input": K[0], "global_scale": 1.0}
BACK = {"fp4_data": np.zeros((2, 16), np.uint8), "block_scales": np.zeros((2, 2), np.uint8),
        "global_scale": 1.0}  # fmt: skip
CALLS: dict[Any, dict[str, Any]] = {
    fi.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping: SLOTS,
    fi.nvfp4_quantize_append_paged_kv_cache: APPEND,
    fi.nvfp4_kv_dequantize_paged: GATHER,
    fi.nvfp4_quantize_paged_kv_cache: WHOLE,
    fi.nvfp4_kv_quantize: ROWS,
    fi.nvfp4_kv_dequantize: BACK,
}


@pytest.mark.parametrize("call", list(CALLS), ids=lambda call: call.__name__)
def test_errors_name_the_argument(call: Any) -> None:
    """Each array in turn has another type, or is none; nothing is written."""
    call(**CALLS[call])
    before = [array.tobytes() for array in (CODES, FACTORS, OUT)]
    for name, value in CALLS[call].items():
        if isinstance(value, np.ndarray):
            with pytest.raises(ValueError, match=f"^({name}|batch_indices)(, keys|, values)?: "):
                call(**CALLS[call] | {name: value.astype(np.float64)})
        if value is not None and name != "global_scale":
            with pytest.raises((TypeError, ValueError), match=f"^{name}: "):
                call(**CALLS[call] | {name: "none"})
    for name in ("k_scale", "v_scale", "k_global_sf", "v_global_sf", "global_scale"):
        if name in CALLS[call] or (name.endswith("sf") and "k_cache" in CALLS[call]):
            with pytest.raises(ValueError, match=f"^{name}: "):
                call(**CALLS[call] | {name: -1.0})
    if call not in (fi.nvfp4_kv_quantize, fi.nvfp4_kv_dequantize):
        with pytest.raises(ValueError, match="^kv_layout: "):
            call(**CALLS[call], kv_layout="DNH")
    assert [array.tobytes() for array in (CODES, FACTORS, OUT)] == before


def test_shapes_of_caches() -> None:
    """Errors of both halves, of pairs that are none; outputs that differ."""
    gather = fi.nvfp4_kv_dequantize_paged
    with pytest.raises(ValueError, match="^paged_kv_cache: expected a pair.*five axes"):
        gather(**GATHER | {"paged_kv_cache": np.zeros((2, 2))})
    with pytest.raises(ValueError, match="^kv_cache_sf: expected a pair.*got 3 arrays"):
        gather(**GATHER | {"kv_cache_sf": (FACTORS[:, 0],) * 3})
    with pytest.raises(ValueError, match="^kv_cache_sf, values: expected shape"):
        gather(**GATHER | {"kv_cache_sf": (FACTORS[:, 0], CODES[:, 0])})
    with pytest.raises(ValueError, match="^output_v: .*must share batch, sequence, and head dims"):
        gather(**GATHER | {"output_v": OUT[:, :2].copy()})
    with pytest.raises(RuntimeError, match="^block_tables: column count insufficient.*2 pages"):
        gather(**GATHER | {"block_tables": np.zeros((2, 1), np.int32),
                           "output_k": np.zeros((2, 5, 2, 32), np.float16),
                           "output_v": np.zeros((2, 5, 2, 32), np.float16)})  # fmt: skip
    for scale in (np.ones(2, np.float32), np.ones((2, 2), np.float32)):
        with pytest.raises(ValueError, match="k_scale and v_scale must be scalar tensors"):
            gather(**GATHER | {"k_scale": scale})
    with pytest.raises(ValueError, match="^k_cache: .*page size"):
        fi.nvfp4_quantize_paged_kv_cache(WHOLE["k_cache"], WHOLE["v_cache"], "NHD")
