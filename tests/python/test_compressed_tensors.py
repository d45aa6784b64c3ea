"""Quantized checkpoints of every convention, read by software that is not ours.

Part 1 decodes the stored tensors with NumPy and ml_dtypes, written from the format descriptions
alone, and compares with `narrowfloat dequantize`, bit for bit in fp32.  Part 2 lets the library
compressed-tensors parse our config.json and decompress our tensors.  It needs torch (several GB),
so it is skipped where that is not installed; `./test.sh --with-torch` installs it and runs it.

The command line is taken from NARROWFLOAT_CLI, or from build/cpu.
"""

import json
import os
import pathlib
import subprocess

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy as safetensors_numpy

ROOT = pathlib.Path(__file__).resolve().parents[2]
CLI = pathlib.Path(os.environ.get("NARROWFLOAT_CLI", ROOT / "build/cpu/src/cli/narrowfloat"))

CONVENTIONS = ["nvfp4-ct", "nvfp4-modelopt", "mxfp4-ct", "mxfp8-ct", "fp8-block", "fp8-channel",
               "fp8-tensor", "fp8-channel-modelopt", "fp8-tensor-modelopt"]  # fmt: skip
COMPRESSED_TENSORS = ["nvfp4-ct", "mxfp4-ct", "mxfp8-ct", "fp8-channel", "fp8-tensor"]
DTYPES = {
    "U8": np.uint8, "F32": np.float32, "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
}


def narrowfloat(*arguments):
    command = [str(CLI), *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"


def read_tensors(directory):
    """Name -> array of all tensors; the reference package splits the files."""
    tensors = {}
    for path in sorted(directory.glob("*.safetensors")):
        for name, info in safetensors.deserialize(path.read_bytes()):
            array = np.frombuffer(info["data"], dtype=DTYPES[info["dtype"]])
            tensors[name] = array.reshape(info["shape"])
    return tensors


def odd_model():
    """Shapes at the edges of blocks, zero blocks, and blocks far below the tensor's maximum."""
    rng = np.random.default_rng(7)
    tensors = {}
    for name, shape in {"a": (1, 32), "b": (130, 2880), "c": (129, 160)}.items():
        weight = rng.standard_normal(shape).astype(np.float32) * np.float32(0.02)
        weight[0, :32] = 0
        weight[0, 1] = -0.0
        weight[-1, 16:32] *= np.float32(1e-7)
        tensors[f"layers.0.{name}_proj.weight"] = weight
    tensors["lm_head.weight"] = rng.standard_normal((4, 32)).astype(np.float32)
    return tensors


@pytest.fixture(scope="module", name="sources")
def make_sources(tmp_path_factory):
    odd = tmp_path_factory.mktemp("source") / "odd"
    odd.mkdir()
    safetensors_numpy.save_file(odd_model(), odd / "model.safetensors", metadata={"format": "pt"})
    (odd / "config.json").write_text('{"model_type": "llama"}')
    return {"odd": odd, "tiny-moe": ROOT / "models/tiny-moe"}


@pytest.fixture(scope="module", name="quantized", params=["odd", "tiny-moe"])
def choose_source(request, sources, tmp_path_factory):
    """A function from a convention to the quantized directory."""
    out = tmp_path_factory.mktemp(request.param)

    def quantize(convention):
        target = out / convention
        if not target.exists():
            narrowfloat("quantize", sources[request.param], target, "--to", convention, "--quiet")
        return target

    quantize.source = sources[request.param]
    return quantize


# --- Part 1: decoding by hand ---------------------------------------------------------------------

E2M1 = np.array([0, .5, 1, 1.5, 2, 3, 4, 6, -0., -.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def unpack(packed):
    """Two codes a byte, the even column in the low nibble."""
    codes = np.stack([packed & 15, packed >> 4], axis=-1)
    return E2M1[codes].reshape(packed.shape[0], -1)


def e8m0(codes):
    return np.ldexp(np.float32(1), codes.astype(np.int32) - 127).astype(np.float32)


def spread(scales, rows, cols, shape):
    """Every scale repeated over its block."""
    return np.repeat(np.repeat(scales, rows, axis=0), cols, axis=1)[:shape[0], :shape[1]]


def decode(convention, stored, module):
    """fp32 values of one weight: the scale first, then its product with the code."""
    part = {name.removeprefix(module + "."): array for name, array in stored.items()
            if name.startswith(module + ".")}
    if convention == "fp8-block":
        codes, scales = part["weight"].astype(np.float32), part["weight_scale_inv"]
        block = (128, 128)
    elif convention in ("fp8-channel", "fp8-tensor", "fp8-tensor-modelopt"):
        return part["weight"].astype(np.float32) * part["weight_scale"]
    elif convention == "fp8-channel-modelopt":
        return part["weight"].astype(np.float32) * part["weight_scale"][:, np.newaxis]
    elif convention == "mxfp8-ct":
        codes, scales = part["weight"].astype(np.float32), e8m0(part["weight_scale"])
        block = (1, 32)
    elif convention == "mxfp4-ct":
        codes, scales, block = unpack(part["weight_packed"]), e8m0(part["weight_scale"]), (1, 32)
    elif convention == "nvfp4-ct":
        codes, block = unpack(part["weight_packed"]), (1, 16)
        scales = part["weight_scale"].astype(np.float32) / part["weight_global_scale"][0]
    else:
        codes, block = unpack(part["weight"]), (1, 16)
        scales = part["weight_scale"].astype(np.float32) * part["weight_scale_2"]
    return codes * spread(scales.astype(np.float32), *block, codes.shape)


def quantized_modules(stored):
    suffixes = (".weight_scale", ".weight_scale_inv")
    return sorted(name.rpartition(".")[0] for name in stored if name.endswith(suffixes))


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_dequantize_equals_decoding_by_hand(quantized, convention, tmp_path):
    target = quantized(convention)
    narrowfloat("dequantize", target, tmp_path / "back", "--dtype", "fp32", "--quiet")
    stored, plain = read_tensors(target), read_tensors(tmp_path / "back")
    modules = quantized_modules(stored)
    assert modules
    for module in modules:
        wanted = decode(convention, stored, module)
        got = plain[module + ".weight"]
        assert got.dtype == np.float32 and got.shape == wanted.shape
        assert np.array_equal(got.view(np.uint32), wanted.view(np.uint32)), module
    assert {n for n in plain if n.endswith(".weight_scale")} == set()


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_quantized_values_are_near_the_source(quantized, convention):
    original, stored = read_tensors(quantized.source), read_tensors(quantized(convention))
    for module in quantized_modules(stored):
        x = original[module + ".weight"].astype(np.float64)
        y = decode(convention, stored, module).astype(np.float64)
        relative_error = np.sqrt(((x - y) ** 2).sum() / max((x ** 2).sum(), 1e-300))
        assert relative_error < (0.05 if "8" in convention.split("-")[0] else 0.15), module


@pytest.mark.parametrize("convention", ["nvfp4-ct", "nvfp4-modelopt"])
def test_no_nvfp4_scale_is_zero(quantized, convention):
    stored = read_tensors(quantized(convention))
    for module in quantized_modules(stored):
        assert (stored[module + ".weight_scale"].view(np.uint8) != 0).all(), module


# --- Part 2: the library compressed-tensors -------------------------------------------------------


@pytest.fixture(scope="module", name="library")
def import_library():
    reason = "needs torch and compressed-tensors: run ./test.sh --with-torch"
    pytest.importorskip("torch", reason=reason)
    return pytest.importorskip("compressed_tensors", reason=reason)


def torch_tensors(directory):
    from safetensors.torch import load_file
    tensors = {}
    for path in sorted(directory.glob("*.safetensors")):
        tensors.update(load_file(path))
    return tensors


def config_of(directory):
    return json.loads((directory / "config.json").read_text())["quantization_config"]


def parts_of(stored, module):
    return {name.removeprefix(module + "."): tensor for name, tensor in stored.items()
            if name.rpartition(".")[0] == module and "bias" not in name}


def assert_same_bf16(library_weight, plain_weight, module):
    import torch
    got = library_weight.to(torch.bfloat16)
    assert torch.equal(got.view(torch.int16), plain_weight.view(torch.int16)), module


@pytest.mark.parametrize("convention", COMPRESSED_TENSORS)
def test_library_decompresses_to_our_values(library, quantized, convention, tmp_path):
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig
    target = quantized(convention)
    narrowfloat("dequantize", target, tmp_path / "back", "--dtype", "bf16", "--quiet")
    declared = config_of(target)
    config = QuantizationConfig.model_validate(declared)
    assert config.quantization_status.value == "compressed" and "lm_head" in config.ignore
    scheme = config.config_groups["group_0"]
    assert scheme.input_activations is None
    compressor = BaseCompressor.get_value_from_registry(config.format)
    stored, plain = torch_tensors(target), torch_tensors(tmp_path / "back")
    modules = quantized_modules(stored)
    assert modules
    for module in modules:
        parts = parts_of(stored, module)
        assert set(parts) == set(compressor.compression_param_names(scheme)), module
        weight = compressor.decompress(parts, scheme)["weight"]
        assert_same_bf16(weight, plain[module + ".weight"], module)


def test_library_dequantizes_fp8_blocks_to_our_values(library, quantized, tmp_path):
    """The library has no DeepSeek files, but the same arithmetic for its own FP8_BLOCK."""
    import torch
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import dequantize
    target = quantized("fp8-block")
    narrowfloat("dequantize", target, tmp_path / "back", "--dtype", "bf16", "--quiet")
    blocks = QuantizationArgs(num_bits=8, type="float", strategy="block",
                              block_structure=[128, 128])
    stored, plain = torch_tensors(target), torch_tensors(tmp_path / "back")
    for module in quantized_modules(stored):
        weight = dequantize(stored[module + ".weight"], stored[module + ".weight_scale_inv"],
                            args=blocks, dtype=torch.float32)
        assert_same_bf16(weight, plain[module + ".weight"], module)


def test_library_decompresses_modelopt_tensors_closely(library, quantized, tmp_path):
    """Its NVFP4 reader divides by a global scale where ModelOpt multiplies: one rounding more."""
    import torch
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig
    target = quantized("nvfp4-modelopt")
    narrowfloat("dequantize", target, tmp_path / "back", "--dtype", "fp32", "--quiet")
    declared = config_of(quantized("nvfp4-ct"))
    scheme = QuantizationConfig.model_validate(declared).config_groups["group_0"]
    compressor = BaseCompressor.get_value_from_registry("nvfp4-pack-quantized")
    stored, plain = torch_tensors(target), torch_tensors(tmp_path / "back")
    for module in quantized_modules(stored):
        parts = {"weight_packed": stored[module + ".weight"],
                 "weight_scale": stored[module + ".weight_scale"],
                 "weight_global_scale": 1 / stored[module + ".weight_scale_2"].reshape(1)}
        weight = compressor.decompress(parts, scheme)["weight"].to(torch.float32)
        torch.testing.assert_close(weight, plain[module + ".weight"], rtol=2**-7, atol=0)
