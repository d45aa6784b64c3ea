"""The forms of arguments that MoeLayer.run() takes: batches, ids of any integer type, floats."""

from __future__ import annotations

import sys

import ml_dtypes
import numpy as np
import pytest

import narrowfloat as nf

RNG = np.random.default_rng(27)
E, K, H, I, T = 6, 2, 128, 64, 12
CONFIG = nf.MoeConfig(hidden=H, inter=I, experts=E, top_k=K)
W1 = (RNG.standard_normal((E, 2 * I, H)) / 8).astype(ml_dtypes.bfloat16)
W2 = (RNG.standard_normal((E, H, I)) / 8).astype(ml_dtypes.bfloat16)
LAYER = nf.MoeLayer.prepare(W1, W2, CONFIG)
X = RNG.standard_normal((T, H)).astype(ml_dtypes.bfloat16)
IDS = np.stack([RNG.permutation(E)[:K] for _ in range(T)]).astype(np.int32)
WEIGHTS = RNG.random((T, K), np.float32)
WANTED = LAYER.run(X, ids=IDS, weights=WEIGHTS)


@pytest.mark.parametrize("dtype", ["int8", "int16", "int64", "uint8", "uint16", "uint32", "uint64"])
def test_ids_of_any_integer_type(dtype: str) -> None:
    """The same bytes as of int32; also what lies beyond int32 is refused by its name."""
    got = LAYER.run(X, ids=IDS.astype(dtype), weights=WEIGHTS)
    assert got.tobytes() == WANTED.tobytes()
    ids = IDS.astype(dtype)
    ids[3, 1] = np.iinfo(dtype).max  # For 64 bits, low halves of it are -1 or valid.
    with pytest.raises(ValueError, match=r"^ids: expected expert ids from 0 to 5, got .*token 3"):
        LAYER.run(X, ids=ids, weights=WEIGHTS)
    if dtype == "int64":
        ids[3, 1] = 1 << 32  # Its low half is expert 0.
        with pytest.raises(ValueError, match=r"^ids: .*token 3"):
            LAYER.run(X, ids=ids, weights=WEIGHTS)


def without(absent: np.ndarray) -> np.ndarray:
    """The output where some slots add nothing: of a layer that names them by -1."""
    config = nf.MoeConfig(hidden=H, inter=I, experts=E, top_k=K, negative_one_is_empty=True)
    layer = nf.MoeLayer.prepare(W1, W2, config)
    return layer.run(X, ids=np.where(absent, np.int32(-1), IDS), weights=WEIGHTS)


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("id", [-1, -5, E, E + 40, 2**31 - 1, -(2**31), 2**40, -(2**40)])
def test_absent_experts(id: int, dtype: str) -> None:
    """Their slots add nothing, also where a token has no other; by default they are errors."""
    if abs(id) > 2**31 and dtype == "int32":
        pytest.skip("no int32")
    absent = RNG.random((T, K)) < 0.4
    absent[5] = True
    ids = np.where(absent, np.array(id, dtype), IDS.astype(dtype))
    got = LAYER.run(X, ids=ids, weights=WEIGHTS, allow_absent=True)
    assert got.tobytes() == without(absent).tobytes()
    assert not got[5].any() and got[~absent.any(1)].astype(np.float32).any()
    with pytest.raises(ValueError, match=r"^ids: expected expert ids from 0 to 5"):
        LAYER.run(X, ids=ids, weights=WEIGHTS)


@pytest.mark.parametrize("id", [-1, -7, E, 1000])
def test_absent_experts_of_packed_routings(id: int) -> None:
    """The upper half of a packed slot is an id."""
    bits = WEIGHTS.astype(ml_dtypes.bfloat16).view(np.uint16).astype(np.int32)
    absent = np.zeros((T, K), bool)
    absent[2, 1] = absent[7] = True
    packed = (np.where(absent, np.int32(id), IDS) << 16) | bits
    rounded = WEIGHTS.astype(ml_dtypes.bfloat16)
    wanted = LAYER.run(X, ids=np.where(absent, np.int32(-3), IDS), weights=rounded,
                       allow_absent=True)  # fmt: skip
    got = LAYER.run(X, packed=packed, allow_absent=True)
    assert got.tobytes() == wanted.tobytes() and not got[7].any()
    with pytest.raises(ValueError, match=r"^packed: expected expert ids"):
        LAYER.run(X, packed=packed)


def test_the_callers_ids_are_not_written() -> None:
    """Changes are made in a copy."""
    ids = np.full((T, K), -1, np.int32)
    assert not LAYER.run(X, ids=ids, weights=WEIGHTS, allow_absent=True).any()
    assert (ids == -1).all()


@pytest.mark.parametrize("lead", [(3, 4), (2, 3, 2), (1, T), (0, 4)])
def test_batches(lead: tuple[int, ...]) -> None:
    """All axes but the last are tokens, in every argument; results have them, too."""
    count = int(np.prod(lead))
    shaped = [array[:count].reshape(*lead, array.shape[1]) for array in (X, IDS, WEIGHTS)]
    chosen, factors = np.empty((*lead, K), np.int32), np.empty((*lead, K), np.float32)
    got = LAYER.run(shaped[0], ids=shaped[1], weights=shaped[2], topk_ids=chosen,
                    expert_weights=factors)  # fmt: skip
    assert got.shape == (*lead, H)
    assert got.tobytes() == WANTED[:count].tobytes()
    assert chosen.tobytes() == IDS[:count].tobytes()
    assert factors.tobytes() == WEIGHTS[:count].tobytes()
    logits = RNG.standard_normal((count, E)).astype(np.float32)
    plain = LAYER.run(X[:count], logits)
    out = np.ones_like(got)
    assert LAYER.run(shaped[0], logits.reshape(*lead, E), out=out) is out
    assert out.tobytes() == plain.tobytes()


def test_batched_results_must_be_views() -> None:
    """A result that would be written into a copy is refused."""
    out = np.ones((4, 3, H), ml_dtypes.bfloat16).transpose(1, 0, 2)
    with pytest.raises(ValueError, match="^out: .*C-contiguous"):
        LAYER.run(X.reshape(3, 4, H), ids=IDS, weights=WEIGHTS, out=out)


@pytest.mark.parametrize("mode", ["bf16", "nvfp4_bf16", "mxfp4_bf16"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("has_ml_dtypes", [True, False])
def test_rows_are_rounded_to_bfloat16(
    mode: str, dtype: str, has_ml_dtypes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the mode multiplies bfloat16 rows; to nearest, ties to even, NaN stays NaN."""
    layer = LAYER
    if mode != "bf16":
        parts = [nf.quantize(w, mode.split("_")[0], batched=True) for w in (W1, W2)]
        config = nf.MoeConfig(hidden=H, inter=I, experts=E, top_k=K, mode=mode)
        layer = nf.MoeLayer.prepare(*parts, config)
    wide = RNG.standard_normal((T, H)).astype(dtype)
    wide[0, :3] = 1 + 2**-8, 1 + 3 * 2**-8, np.nan
    wanted = layer.run(wide.astype(ml_dtypes.bfloat16), ids=IDS, weights=WEIGHTS)
    if not has_ml_dtypes:
        monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    got = layer.run(wide, ids=IDS, weights=WEIGHTS)
    finite = ~np.isnan(wanted.astype(np.float32))
    assert not finite[0].any() and finite[1:].all()
    assert got.view(np.uint16)[1:].tobytes() == wanted.view(np.uint16)[1:].tobytes()


def test_rounding_without_ml_dtypes_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for every kind of float32: ties, overflow, denormals, infinities."""
    from narrowfloat._moe_call import to_bfloat16

    bits = RNG.integers(0, 2**32, 1 << 16, np.uint32)
    bits[:8] = 0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 1, 0x80000000, 0x8000
    values = bits.view(np.float32)
    with np.errstate(all="ignore"):
        wanted = values.astype(ml_dtypes.bfloat16)
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    got = to_bfloat16("x", values).view(np.uint16)
    numbers = ~np.isnan(values)
    assert (got[numbers] == wanted.view(np.uint16)[numbers]).all()
    assert ((got[~numbers] & 0x7FFF) > 0x7F80).all()


WRONG = {
    "hidden": lambda: LAYER.run(X[:, :64], ids=IDS, weights=WEIGHTS),
    "logits": lambda: LAYER.run(X, np.zeros((T, E + 1), np.float32)),
    "ids": lambda: LAYER.run(X, ids=IDS[:, :1], weights=WEIGHTS),
    "weights": lambda: LAYER.run(X, ids=IDS, weights=WEIGHTS.astype(np.float64)),
    "out": lambda: LAYER.run(X, ids=IDS, weights=WEIGHTS, out=np.zeros((T, H), np.float64)),
    "topk_ids": lambda: LAYER.run(X, ids=IDS, weights=WEIGHTS, topk_ids=np.zeros((T, 3), "i4")),
    "hidden_scales": lambda: LAYER.run(X, ids=IDS, weights=WEIGHTS,
                                       hidden_scales=np.zeros((T, 4), np.uint8)),
    "packed": lambda: LAYER.run(X, packed=np.zeros((T, K), np.int64)),
}  # fmt: skip


@pytest.mark.parametrize("argument", list(WRONG))
def test_errors_name_the_argument_of_python(argument: str) -> None:
    """At their beginning; nothing of the C++ structures is left."""
    with pytest.raises(ValueError, match=f"^{argument}\\b") as caught:
        WRONG[argument]()
    assert not any(f"{group}." in str(caught.value) for group in ("inputs", "routing", "outputs"))


def test_ids_are_integers() -> None:
    """Floats and booleans are no ids."""
    for wrong in (IDS.astype(np.float32), IDS > 2):
        with pytest.raises(ValueError, match="^ids: expected integers"):
            LAYER.run(X, ids=wrong, weights=WEIGHTS)
