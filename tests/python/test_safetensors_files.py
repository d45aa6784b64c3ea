"""Our safetensors reader and writer against the reference implementation (PyPI safetensors).

The helper safetensors_copy reads a file with our reader and writes it with our writer. A file that
the reference wrote, copied, and read by the reference again must hold the same tensors; a file that
the reference refuses must be refused.
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
from quantize_raw import program

# The format's name of each type that NumPy and ml_dtypes have.
DTYPES = {
    "BOOL": np.bool_, "U8": np.uint8, "I8": np.int8, "I16": np.int16, "U16": np.uint16,
    "F16": np.float16, "BF16": ml_dtypes.bfloat16, "I32": np.int32, "U32": np.uint32,
    "F32": np.float32, "F64": np.float64, "I64": np.int64, "U64": np.uint64, "C64": np.complex64,
    "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu, "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
    "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
}
# Types that releases of the reference before 0.8 may not write.
NEWER = {"C64", "F8_E4M3FNUZ", "F8_E5M2FNUZ"}
# The rest of the format's types, as bits an element.
PACKED = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
SHAPES = [(), (1,), (3,), (5, 7), (2, 0, 3), (3, 1001)]


def copy(source: pathlib.Path, target: pathlib.Path) -> subprocess.CompletedProcess:
    command = [str(program("safetensors_copy")), str(source), str(target)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def random_array(rng, name, shape):
    dtype = np.dtype(DTYPES[name])
    count = int(np.prod(shape, dtype=np.int64))
    if name == "BOOL":
        return rng.integers(0, 2, count).astype(np.bool_).reshape(shape)
    raw = rng.integers(0, 256, count * dtype.itemsize, dtype=np.uint8)
    return np.frombuffer(raw.tobytes(), dtype=dtype).reshape(shape)


def reference_writes(name):
    try:
        safetensors_numpy.save({"t": np.zeros(1, DTYPES[name])})
    except safetensors.SafetensorError:
        return False
    return True


def random_tensors(seed):
    rng = np.random.default_rng(seed)
    dtypes = [name for name in DTYPES if name not in NEWER or reference_writes(name)]
    return {f"{name}.{'x'.join(map(str, shape))}": random_array(rng, name, shape)
            for name in dtypes for shape in SHAPES}


def format_name(array):
    return next(name for name, dtype in DTYPES.items() if np.dtype(dtype) == array.dtype)


def read_reference(path):
    """Name -> (dtype, shape, bytes), as the reference implementation reads the file."""
    return {name: (entry["dtype"], tuple(entry["shape"]), bytes(entry["data"]))
            for name, entry in safetensors.deserialize(path.read_bytes())}


def raw_file(header, data):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def test_copy_of_a_reference_file_holds_the_same_tensors(tmp_path):
    tensors = random_tensors(1)
    source, target = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    source.write_bytes(safetensors_numpy.save(tensors, {"format": "pt"}))
    result = copy(source, target)
    assert result.returncode == 0, result.stderr
    read = read_reference(target)
    assert read == read_reference(source)
    assert len(read) == len(tensors)
    for name, array in tensors.items():
        assert read[name] == (format_name(array), array.shape, array.tobytes()), name


def test_metadata_survives_the_copy(tmp_path):
    metadata = {"format": "pt", "note": 'a "quote"\nand é', "empty": ""}
    source, target = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    source.write_bytes(safetensors_numpy.save({"t": np.zeros(3, np.uint8)}, metadata))
    assert copy(source, target).returncode == 0
    with safetensors.safe_open(target, framework="numpy") as file:
        assert file.metadata() == metadata


def test_arrays_are_equal_through_the_numpy_front_end(tmp_path):
    tensors = {name: array for name, array in random_tensors(2).items()
               if np.dtype(array.dtype).isbuiltin == 1}
    source, target = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    source.write_bytes(safetensors_numpy.save(tensors))
    assert copy(source, target).returncode == 0
    read = safetensors_numpy.load_file(target)
    assert read.keys() == tensors.keys()
    for name, array in tensors.items():
        assert read[name].dtype == array.dtype
        np.testing.assert_array_equal(read[name], array)


@pytest.mark.parametrize("dtype", sorted(PACKED))
def test_packed_types_pass_through(tmp_path, dtype):
    shape = [4, 6]
    data = os.urandom(24 * PACKED[dtype] // 8)
    header = {"t": {"dtype": dtype, "shape": shape, "data_offsets": [0, len(data)]}}
    source, target = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    source.write_bytes(raw_file(header, data))
    assert copy(source, target).returncode == 0
    assert read_reference(target) == read_reference(source)
    assert read_reference(target)["t"][2] == data


def test_a_second_copy_is_byte_identical(tmp_path):
    source = tmp_path / "in.safetensors"
    source.write_bytes(safetensors_numpy.save(random_tensors(3), {"b": "2", "a": "1"}))
    first, second = tmp_path / "1.safetensors", tmp_path / "2.safetensors"
    assert copy(source, first).returncode == 0
    assert copy(first, second).returncode == 0
    assert first.read_bytes() == second.read_bytes()


def test_our_files_are_aligned(tmp_path):
    source, target = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    source.write_bytes(safetensors_numpy.save(random_tensors(4)))
    assert copy(source, target).returncode == 0
    blob = target.read_bytes()
    length = int.from_bytes(blob[:8], "little")
    assert (8 + length) % 4096 == 0
    for entry in json.loads(blob[8:8 + length]).values():
        width = np.dtype(DTYPES[entry["dtype"]]).itemsize
        assert entry["data_offsets"][0] % width == 0


U8 = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}
BOTH_REFUSE = {
    "empty file": b"",
    "truncated header": raw_file({"t": U8}, b"")[:20],
    "truncated data": raw_file({"t": U8}, b"abc"),
    "trailing data": raw_file({"t": U8}, b"abcde"),
    "no object": raw_file(b"[]", b""),
    "huge length": b"\xff" * 8 + b"{}",
    "hole": raw_file({"t": {**U8, "data_offsets": [1, 5]}}, b"abcde"),
    "overlap": raw_file({"a": U8, "b": {**U8, "data_offsets": [3, 7]}}, b"abcdefg"),
    "wrong size": raw_file({"t": {**U8, "shape": [5]}}, b"abcd"),
    "overflow": raw_file({"t": {**U8, "shape": [2**32, 2**32], "data_offsets": [0, 0]}}, b""),
    "negative": raw_file({"t": {**U8, "shape": [-4]}}, b"abcd"),
    "float": raw_file({"t": {**U8, "shape": [4.0]}}, b"abcd"),
    "unknown dtype": raw_file({"t": {**U8, "dtype": "U4"}}, b"abcd"),
    "odd F4": raw_file({"t": {"dtype": "F4", "shape": [7], "data_offsets": [0, 4]}}, b"abcd"),
    "metadata number": raw_file({"__metadata__": {"k": 1}}, b""),
}


# Two parsers could read these differently, so we refuse what the reference lets pass.
WE_REFUSE = {
    "leading space": raw_file(b" {}", b""),
    "trailing newline": raw_file(b"{}\n", b""),
    "duplicate tensor": raw_file(b'{"t":%s,"t":%s}' % ((json.dumps(U8).encode(),) * 2), b"abcd"),
    "NUL in a name": raw_file({"a\0b": U8}, b"abcd"),
}


def expect_refusal(tmp_path, content):
    source, target = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    source.write_bytes(content)
    result = copy(source, target)
    assert result.returncode == 1
    assert "in.safetensors" in result.stderr
    assert os.listdir(tmp_path) == ["in.safetensors"]


@pytest.mark.parametrize("case", sorted(BOTH_REFUSE))
def test_what_the_reference_refuses_is_refused(tmp_path, case):
    with pytest.raises(safetensors.SafetensorError):
        safetensors.deserialize(BOTH_REFUSE[case])
    expect_refusal(tmp_path, BOTH_REFUSE[case])


@pytest.mark.parametrize("case", sorted(WE_REFUSE))
def test_what_two_parsers_could_read_differently_is_refused(tmp_path, case):
    expect_refusal(tmp_path, WE_REFUSE[case])
