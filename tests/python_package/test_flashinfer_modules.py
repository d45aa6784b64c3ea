"""narrowfloat.compat.flashinfer: FlashInfer's modules, and its name for the whole.

What engines import from where is a list of the specification (engines 4).
"""

from __future__ import annotations

import importlib
import importlib.util
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from flashinfer_table import ABSENT, BITS, record
from test_flashinfer_mixed_input import folded, interleaved
from test_flashinfer_quantizers import LIBRARIES

import narrowfloat as nf
import narrowfloat.compat.flashinfer as fi
from narrowfloat.compat.flashinfer import tllm_enums, utils
from narrowfloat.compat.flashinfer.fused_moe import core
from narrowfloat.compat.flashinfer.quantization import nvfp4_quantization_utils as recipes

RNG = np.random.default_rng(26)
MODULES = {
    "activation": "silu_and_mul_scaled_nvfp4_experts_quantize silu_and_mul gelu_and_mul "
    "gelu_tanh_and_mul",
    "autotuner": "autotune",
    "comm": "allreduce_fusion create_allreduce_fusion_workspace AllReduceFusionPattern "
    "trtllm_allreduce_fusion QuantizationSFLayout",
    "cute_dsl": "rmsnorm_fp4quant add_rmsnorm_fp4quant",
    "fp4_quantization": "nvfp4_quantize fp4_quantize mxfp4_quantize block_scale_interleave "
    "nvfp4_block_scale_interleave e2m1_and_ufp8sf_scale_to_float shuffle_matrix_a "
    "shuffle_matrix_sf_a nvfp4_kv_quantize",
    "fp8_quantization": "mxfp8_quantize mxfp8_dequantize_host",
    "fused_moe": "cutlass_fused_moe trtllm_fp4_block_scale_moe trtllm_bf16_moe ActivationType "
    "RoutingMethodType WeightLayout Fp8QuantizationType convert_to_block_layout "
    "fused_topk_deepseek interleave_moe_weights_for_sm90_mixed_gemm "
    "interleave_moe_scales_for_sm90_mixed_gemm preprocess_moe_weights_for_sm90_mixed_gemm_humming "
    "TrtllmGenRoutingResult trtllm_gen_routing hash_topk NVFP44Over6Config",
    "fused_moe.core": "_maybe_get_cached_w3_w1_permute_indices get_w2_permute_indices_with_cache "
    "get_reorder_rows_for_gated_act_gemm_row_indices reorder_rows_for_gated_act_gemm "
    "RoutingMethodType ActivationType Fp8QuantizationType convert_to_block_layout "
    "trtllm_fp8_block_scale_moe trtllm_fp4_block_scale_routed_moe",
    "fused_moe.cute_dsl.moe_utils": "moe_sort moe_permute moe_unpermute moe_activation",
    "fused_moe.monomoe": "mono_moe has_monomoe alloc_scratchpad interleave_for_tma_wgmma_up",
    "gemm": "nvfp4_quantize_smooth mm_fp4 mm_mxfp8 mm_bf16_fp4 gemm_fp8_nt_groupwise "
    "group_gemm_fp8_nt_groupwise group_gemm_mxfp8_mxfp4_nt_groupwise "
    "group_gemm_nvfp4_nt_groupwise batch_deepgemm_fp8_nt_groupwise "
    "group_deepgemm_fp8_nt_groupwise grouped_gemm_nt_masked",
    "norm": "rmsnorm_fp4quant add_rmsnorm_fp4quant rmsnorm_quant fused_add_rmsnorm_quant",
    "page": "nvfp4_quantize_append_paged_kv_cache "
    "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping",
    "quantization": "nvfp4_quantize mxfp8_quantize packbits segment_packbits SfLayout "
    "per_token_group_quant_8bit NVFP44Over6Config make_nvfp4_global_scale resolve_nvfp4_4over6",
    "quantization.fp4_quantization": "nvfp4_quantize SfLayout",
    "quantization.fp8_quantization": "mxfp8_grouped_quantize per_token_group_quant_8bit",
    "quantization.nvfp4_quantization_utils": "NVFP44Over6Config nvfp4_e4m3_max",
    "quantization.packbits": "packbits segment_packbits",
    "tllm_enums": "ActivationType RoutingMethodType SfLayout WeightLayout GatedActType "
    "Fp8QuantizationType RoutingInputMode is_gated_activation",
    "utils": "calculate_tile_tokens_dim device_support_pdl get_shuffle_matrix_a_row_indices "
    "get_shuffle_matrix_sf_a_row_indices next_positive_power_of_2",
}


@pytest.fixture(params=LIBRARIES, ids=lambda lib: lib.__name__)
def lib(request: pytest.FixtureRequest) -> Any:
    """Where arrays come from."""
    return request.param


@pytest.mark.parametrize("name", list(MODULES))
def test_modules(name: str) -> None:
    """A name is the same object in each module that has it, and listed there."""
    module = importlib.import_module(f"narrowfloat.compat.flashinfer.{name}")
    assert set(MODULES[name].split()) <= set(module.__all__)
    for word in module.__all__:
        assert getattr(fi, word, getattr(module, word)) is getattr(module, word), word


def test_modules_are_there_without_an_import() -> None:
    """As attributes of the package, which upstream's are."""
    code = "import narrowfloat.compat.flashinfer as fi\n" + "\n".join(
        f"fi.{name}.{words.split()[0]}" for name, words in MODULES.items()
        if name != "quantization.packbits"  # A function of this name hides it, as upstream.
    )
    subprocess.run([sys.executable, "-c", code], check=True)


INSTALL = "from narrowfloat.compat import install_as_flashinfer\ninstall_as_flashinfer()\n"


def run(code: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """The code in a process of its own, with a folder before all others on its path."""
    first = f"import sys\nsys.path.insert(0, {str(path)!r})\n" if path else ""
    return subprocess.run([sys.executable, "-c", first + code], capture_output=True, text=True,
                          check=False)  # fmt: skip


@pytest.mark.skipif(importlib.util.find_spec("flashinfer") is not None,
                    reason="a real FlashInfer is installed")  # fmt: skip
def test_install_as_flashinfer() -> None:
    """Every import form finds the same modules; again it changes nothing."""
    done = run("import importlib.util\nimport sys\n" + INSTALL * 2 + "\n".join(
        f"import flashinfer.{name}\nfrom flashinfer.{name} import {', '.join(words.split())}"
        for name, words in MODULES.items()
    ) + """
import flashinfer
import narrowfloat.compat.flashinfer as ours
import narrowfloat.compat.flashinfer.fused_moe.core as core
assert flashinfer is ours and flashinfer.__version__ == "0.7.2"
assert sys.modules["flashinfer.fused_moe.core"] is core is flashinfer.fused_moe.core
assert importlib.util.find_spec("flashinfer") and importlib.util.find_spec("flashinfer.comm")
try:
    import flashinfer.decode
except ModuleNotFoundError as error:
    assert error.name == "flashinfer.decode"
else:
    raise AssertionError("attention is not offered")
""")  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_a_real_flashinfer_is_not_hidden(tmp_path: Path) -> None:
    """Whether it was imported before or not."""
    (tmp_path / "flashinfer.py").write_text("")
    for before in ("", "import flashinfer\n"):
        done = run(before + INSTALL, tmp_path)
        assert done.returncode == 1
        assert "ImportError: flashinfer: a real FlashInfer is installed" in done.stderr


def test_gated_activations() -> None:
    """Six of thirteen, asked by member, number or property."""
    gated = {"Swiglu", "Geglu", "SwigluBias", "SwigluStep", "GegluTanh", "Situ"}
    for member in fi.ActivationType:
        wanted = member.name in gated
        assert member.is_gated == fi.is_gated_activation(member) == wanted
        assert fi.is_gated_activation(int(member)) == wanted
    with pytest.raises(ValueError, match="activation_type: .*77"):
        fi.is_gated_activation(77)
    assert fi.ActivationType.ClampedRelu2 == 12 and fi.GatedActType.GeGlu == 1
    assert tllm_enums.DEFAULT_SWIGLU_LIMIT == np.finfo(np.float32).max


def test_small_helpers() -> None:
    """Tiles, powers of two, capabilities."""
    assert [utils.next_positive_power_of_2(n) for n in (-1, 0, 1, 2, 3, 64, 65)] == [
        1, 1, 1, 2, 4, 64, 128]  # fmt: skip
    assert [utils.last_positive_power_of_2(n) for n in (0, 1, 3, 64, 65)] == [1, 1, 2, 64, 64]
    # 4096 * 8 / 128 = 256 tokens an expert, 332 with imbalance; 100 * 8 / 128 = 6, 7 with it.
    assert utils.calculate_tile_tokens_dim(4096, 128, 8) == 128
    assert utils.calculate_tile_tokens_dim(4096, 128, 8, 1024) == 512
    assert utils.calculate_tile_tokens_dim(100, 128, 8) == 8
    assert utils.calculate_tile_tokens_dim(700, 128, 8) == 64
    assert utils.round_up(5, 4) == 8 and utils.ceil_div(5, 4) == 2
    assert not utils.device_support_pdl("cpu")
    with pytest.raises(ValueError, match="device must be a cuda device, got cpu"):
        utils.get_compute_capability("cpu")


def test_torch_helpers() -> None:
    """They know torch's devices and types."""
    torch = pytest.importorskip("torch", reason="torch is not installed; ./test.sh --with-torch")
    assert not utils.device_support_pdl(torch.device("cpu"))
    assert utils.get_native_fp4_dtype() is torch.float4_e2m1fn_x2
    if torch.cuda.is_available():
        assert utils.device_support_pdl(torch.device("cuda", 0))
        assert utils.get_compute_capability(torch.device("cuda", 0)) >= (9, 0)


def gathered(lib: Any, array: Any, indices: Any) -> bytes:
    """The rows of an array in the order of the indices."""
    return lib.raw(array[indices])


def test_row_indices(lib: Any) -> None:
    """A gather with them is what the layout functions do."""
    weight = lib.make(RNG.integers(0, 256, (256, 64), dtype=np.uint8))
    for tile in (64, 128):
        indices = utils.get_shuffle_matrix_a_row_indices(weight, tile)
        assert str(indices.dtype).endswith("int64")
        assert str(getattr(indices, "device", "cpu")) == "cpu"
        assert gathered(lib, weight, indices) == lib.raw(fi.shuffle_matrix_a(weight, tile))
        scales = utils.get_shuffle_matrix_sf_a_row_indices(weight, tile, 32)
        assert fi.block_scale_interleave(weight[scales]).shape == (256 * 64,)
        assert lib.raw(fi.block_scale_interleave(weight[scales])) == lib.raw(
            fi.shuffle_matrix_sf_a(weight, tile))  # fmt: skip
    alternating = core.get_reorder_rows_for_gated_act_gemm_row_indices(weight)
    assert gathered(lib, weight, alternating) == lib.raw(fi.reorder_rows_for_gated_act_gemm(weight))


def test_cached_row_indices(lib: Any) -> None:
    """Both matrices have them, for weights and scales; results are kept by all that matters."""
    weight = lib.make(RNG.integers(0, 256, (256, 64), dtype=np.uint8))
    cache: dict[Any, Any] = {}
    first = core._maybe_get_cached_w3_w1_permute_indices(cache, weight, 128)
    prepared = fi.shuffle_matrix_a(fi.reorder_rows_for_gated_act_gemm(weight), 128)
    assert gathered(lib, weight, first) == lib.raw(prepared)
    assert core._maybe_get_cached_w3_w1_permute_indices(cache, weight, 128) is first
    plain = core._maybe_get_cached_w3_w1_permute_indices(cache, weight, 128,
                                                         is_gated_act_gemm=False)  # fmt: skip
    assert gathered(lib, weight, plain) == lib.raw(fi.shuffle_matrix_a(weight, 128))
    scales = core._maybe_get_cached_w3_w1_permute_indices(cache, weight, 128, num_elts_per_sf=16)
    assert lib.raw(scales) == lib.raw(first) and scales is not first
    second = core.get_w2_permute_indices_with_cache(cache, weight, 128)
    assert lib.raw(second) == lib.raw(plain) and len(cache) == 4
    assert str(getattr(second, "device", "cpu")) == str(getattr(weight, "device", "cpu"))


def test_row_indices_refuse() -> None:
    """With upstream's AssertionError, which is a ValueError here, too."""
    odd, wide = np.zeros((40, 8), np.uint8), np.zeros((2, 32, 8), np.uint8)
    for call in (
        lambda: utils.get_shuffle_matrix_a_row_indices(odd, 128),
        lambda: utils.get_shuffle_matrix_a_row_indices(wide, 128),
        lambda: utils.get_shuffle_matrix_sf_a_row_indices(odd, 128),
        lambda: utils.get_shuffle_matrix_sf_a_row_indices(np.zeros((128, 8), np.int32), 128),
        lambda: utils.get_shuffle_matrix_sf_a_row_indices(np.zeros((128, 8), np.uint8), 128, 8),
        lambda: core.get_reorder_rows_for_gated_act_gemm_row_indices(odd[:3]),
    ):
        for kind in (AssertionError, ValueError):
            with pytest.raises(kind, match="^(input_tensor|x|num_elts_per_sf): expected"):
                call()


def test_interleaving_for_hopper(lib: Any) -> None:
    """The bytes of a model that goes bit by bit."""
    weight = RNG.integers(0, 256, (2, 32, 64), dtype=np.uint8)
    got = fi.interleave_moe_weights_for_sm90_mixed_gemm(lib.make(weight))
    assert tuple(got.shape) == weight.shape and lib.raw(got) == interleaved(weight).tobytes()
    scales = RNG.integers(0, 256, (2, 128, 8), dtype=np.uint8)
    got = fi.interleave_moe_scales_for_sm90_mixed_gemm(lib.make(scales))
    assert tuple(got.shape) == (2, 2, 2, 16, 16) and lib.raw(got) == folded(scales).tobytes()
    wide = RNG.integers(0, 2**16, (1, 64, 2)).astype(np.float32).astype(np.float16)
    got = fi.interleave_moe_scales_for_sm90_mixed_gemm(lib.make(wide), 128)
    assert tuple(got.shape) == (1, 1, 2, 8, 8)
    assert lib.raw(got) == wide.reshape(1, 1, 8, 8, 2, 1).transpose(0, 1, 4, 3, 2, 5).tobytes()
    for name in ("interleave_moe_scales_for_sm90_mixed_gemm",
                 "interleave_moe_weights_for_sm90_mixed_gemm"):  # fmt: skip
        record(name, BITS, "MXFP4 alone")


def test_interleaving_refuses() -> None:
    """Shapes, types and formats."""
    weight, scales = np.zeros((1, 16, 32), np.uint8), np.zeros((1, 64, 4), np.uint8)
    weights = fi.interleave_moe_weights_for_sm90_mixed_gemm
    for call, words in (
        (lambda: weights(weight[0]), "weight must be 3D"),
        (lambda: weights(weight.astype(np.int32)), "weight must be uint8"),
        (lambda: weights(weight, "fp6"), "quant_type must be one of"),
        (lambda: weights(weight[:, :8]), "weight: .*16 rows"),
        (lambda: fi.interleave_moe_scales_for_sm90_mixed_gemm(scales[0]), "scales must be 3D"),
        (lambda: fi.interleave_moe_scales_for_sm90_mixed_gemm(scales, 48), "divide 128"),
        (lambda: fi.interleave_moe_scales_for_sm90_mixed_gemm(scales[:, :32]), "rows divisible"),
        (lambda: fi.interleave_moe_scales_for_sm90_mixed_gemm(scales[:, :, :3]), "divisible by 4"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    for kind in ("int4", "fp4_fp8"):
        with pytest.raises(NotImplementedError, match=f"quant_type: {kind}"):
            weights(weight, kind)
    with pytest.raises(NotImplementedError, match="weight: Humming"):
        fi.preprocess_moe_weights_for_sm90_mixed_gemm_humming(weight, scales)
    record("preprocess_moe_weights_for_sm90_mixed_gemm_humming", ABSENT,
           "nothing here takes Humming's weights")  # fmt: skip


RECIPES = [fi.NVFP44Over6Config(largest, mode, fast) for largest in (448, 256)
           for mode in ("mae", fi.NVFP44Over6ErrMode.MSE) for fast in (False, True)]  # fmt: skip


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_recipes(recipe: Any) -> None:
    """Codes and pickles lead back; the argument is what the library's own option is."""
    assert recipes.nvfp4_4over6_from_code(recipes.nvfp4_4over6_code(recipe)) == recipe
    assert pickle.loads(pickle.dumps(recipe)) == recipe
    assert recipes.nvfp4_e4m3_max(recipe) == recipe.e4m3_max
    x = RNG.standard_normal((64, 256)).astype(np.float16)
    got = fi.nvfp4_quantize(x, 300.0, nvfp4_4over6=recipe)
    option = nf.FourOverSix(recipe.err_mode_name.lower(),
                            "fast" if recipe.err_use_fast_math else "strict",
                            recipe.e4m3_max)  # fmt: skip
    wanted = fi.nvfp4_quantize(x, 300.0, four_over_six=option)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(got, wanted, strict=True))
    assert got[0].tobytes() != fi.nvfp4_quantize(x, 300.0)[0].tobytes()


def test_recipes_and_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables count where the argument is left out, and nowhere else."""
    x = RNG.standard_normal((64, 256)).astype(np.float16)
    plain = fi.nvfp4_quantize(x, 300.0)[0].tobytes()
    assert fi.resolve_nvfp4_4over6() is None
    monkeypatch.setenv("FLASHINFER_NVFP4_4OVER6", "1")
    assert fi.resolve_nvfp4_4over6() == fi.NVFP44Over6Config()
    assert fi.nvfp4_quantize(x, 300.0)[0].tobytes() != plain
    assert fi.nvfp4_quantize(x, 300.0, nvfp4_4over6=None)[0].tobytes() == plain
    assert fi.resolve_nvfp4_4over6(None) is None
    assert fi.make_nvfp4_global_scale(x, True)[0] == np.float32(1 / 2688)
    small = fi.NVFP44Over6Config(256)
    assert fi.make_nvfp4_global_scale(x, True, None, small)[0] == np.float32(1 / 1536)


def test_recipes_refuse() -> None:
    """Other types, other numbers, FP8 inputs, two options at once."""
    x = np.ones((4, 64), np.float16)
    recipe = fi.NVFP44Over6Config()
    for call, kind, words in (
        (lambda: fi.NVFP44Over6Config(300), ValueError, "must be either 256 or 448"),
        (lambda: fi.NVFP44Over6Config(448, "max"), ValueError, "must be MAE or MSE"),
        (lambda: fi.nvfp4_quantize(x, 1.0, nvfp4_4over6=True), TypeError, "NVFP44Over6Config"),
        (lambda: fi.fp4_quantize(x.astype(ml_dtypes.float8_e4m3fn), 1.0, nvfp4_4over6=recipe),
         ValueError, "requires fp16 or bf16 input"),
        (lambda: fi.fp4_quantize(x, None, 32, True, nvfp4_4over6=recipe), ValueError, "NVFP4"),
        (lambda: fi.nvfp4_quantize(x, 1.0, nvfp4_4over6=recipe, four_over_six=True), ValueError,
         "give one of them"),
        (lambda: recipes.nvfp4_4over6_from_code(32), ValueError, "code: "),
        (lambda: recipes.nvfp4_4over6_from_code(-2), ValueError, "code: "),
        (lambda: recipes.nvfp4_4over6_from_code(9), ValueError, "error mode"),
    ):  # fmt: skip
        with pytest.raises(kind, match=words):
            call()
