"""Hostile and broken sources, one expected error each: files, indexes and configs.

Every case is generated here, and `inspect` must refuse it with exit code 3, with a message that
names the file and says what is wrong, and without a word on stdout.
"""

import json
import os
import struct

import pytest
from conftest import DONE, INPUT, run, write_safetensors

BITS = {"BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8,
        "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16,
        "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "C64": 64, "F64": 64, "I64": 64,
        "U64": 64}


def file_of(header, data=b"", length=None):
    header = header if isinstance(header, bytes) else header.encode()
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def entry(dtype='"U8"', shape="[8]", offsets="[0,8]", name='"t"'):
    return f'{name}:{{"dtype":{dtype},"shape":{shape},"data_offsets":{offsets}}}'


def tensor(data=8, **parts):
    return file_of("{" + entry(**parts) + "}", bytes(data))


GOOD = entry()
FILES = {}


def add(group, expected, **cases):
    for name, content in cases.items():
        FILES[f"{group}: {name}"] = (content, expected)


add("length", "less than the length field", **{f"{n} bytes": bytes(n) for n in range(8)})
add("length", "does not fit", **{
    f"{n} of 2": struct.pack("<Q", n) + b"{}" for n in (3, 4, 10, 255, 65536, 99_999_999, 10**8)})
add("length", "over the limit of 100000000 bytes; is it a safetensors file?", **{
    str(n): struct.pack("<Q", n) + b"{}"
    for n in (10**8 + 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 8, 2**64 - 2, 2**64 - 1)})
add("frame", "must start with", **{
    repr(text): file_of(text) for text in (
        "", " {}", "\n{}", "\t{}", "[]", "[{}]", "null", "1", '"x"', "\ufeff{}", "\0{}", "}{",
        "//{}", "pickle")})
add("frame", "must end with", **{
    repr(text): file_of(text) for text in (
        "{}\n", "{}\t", "{}\0", "{}x", "{} x", "{", "{ ", "{}]", "{}\r\n", '{"a":1,', '{"a"')})
add("frame", "invalid JSON", **{
    repr(text): file_of(text) for text in (
        "{}{}", "{}}", "{,}", "{]}", "{1:2}", "{a:1}", "{'a':1}", '{"a"}', '{"a":}', '{"a" 1}',
        '{"__metadata__":{},}', '{"__metadata__":{} "b":2}',
        '{"t":{"shape":[}}', '{"a":+1}', '{"a":.5}', '{"a":1.}',
        '{"a":1e}', '{"a":NaN}', '{"a":Infinity}', '{"a":-}', '{"a":tru}',
        '{"a":/**/1}', '{"\\x":1}', '{"\\u12":1}', '{"\\ud800":1}', '{"\\udc00":1}',
        '{"\\ud800\\u0041":1}', '{"a\nb":1}', '{"a\tb":1}', '{"a\x01b":1}')})
add("frame", "invalid JSON", **{
    name: file_of(b'{"' + text + b'":1}') for name, text in {
        "byte 80": b"\x80", "byte ff": b"\xff", "overlong slash": b"\xc0\xaf",
        "overlong NUL": b"\xc0\x80", "surrogate": b"\xed\xa0\x80", "cut short": b"\xe2\x82",
        "beyond Unicode": b"\xf4\x90\x80\x80", "five bytes": b"\xf8\x88\x80\x80\x80"}.items()})
add("frame", "NUL", **{"in a key": file_of('{"a\0b":1}'), "in a number": file_of('{"a":1\0}'),
                       "escaped in a name": file_of("{" + entry(name='"a\\u0000b"') + "}",
                                                    bytes(8))})
add("depth", "nested deeper", **{
    f"{n} arrays": file_of('{"t":{"shape":' + "[" * n + "}}") for n in (2, 100, 10**5)})
add("duplicates", "duplicate key", **{
    "tensors": file_of("{" + GOOD + "," + GOOD + "}", bytes(8)),
    "escaped": file_of("{" + GOOD + "," + entry(name='"\\u0074"') + "}", bytes(8)),
    "metadata": file_of('{"__metadata__":{},"__metadata__":{}}'),
    "metadata keys": file_of('{"__metadata__":{"a":"1","a":"2"}}'),
    "dtype": file_of('{"t":{"dtype":"U8","dtype":"U8","shape":[8],"data_offsets":[0,8]}}',
                     bytes(8)),
    "shape": file_of('{"t":{"dtype":"U8","shape":[8],"shape":[8],"data_offsets":[0,8]}}',
                     bytes(8)),
    "offsets": file_of('{"t":{"dtype":"U8","shape":[8],"data_offsets":[0,8],'
                       '"data_offsets":[0,8]}}', bytes(8))})
NUMBERS = ("-1", "-0", "1.0", "1e3", "1E3", "8.0", "0.5", "1e400", "-1e400", "true", "null", '"8"',
           "[8]", "9223372036854775808", "18446744073709551616", "1" + "0" * 100)
for place, parts in (("shape", lambda n: {"shape": f"[{n}]"}),
                     ("begin", lambda n: {"offsets": f"[{n},8]"}),
                     ("end", lambda n: {"offsets": f"[0,{n}]"})):
    for number in NUMBERS:
        add(f"number as {place}", r"must hold plain|number overflow|nested deeper",
            **{number: tensor(**parts(number))})
add("number spelled", "invalid JSON", shape=tensor(shape="[08]"), hexadecimal=tensor(shape="[0x8]"),
    begin=tensor(offsets="[00,8]"), end=tensor(offsets="[0,08]"))
add("offsets", "end before they begin", a=tensor(offsets="[8,0]"), b=tensor(offsets="[5,4]"))
add("offsets", "end after the file", **{
    str(end): tensor(offsets=f"[0,{end}]") for end in (9, 10**9, 2**62, 2**63 - 1)})
add("offsets", "must hold two", **{
    text: tensor(offsets=text) for text in ("[]", "[0]", "[0,8,8]", "[0,8,0,8]")})
add("offsets", "belong to no tensor", **{
    "trailing byte": tensor(data=9), "leading byte": tensor(9, offsets="[1,9]"),
    "data without tensors": file_of("{}", b"x"),
    "gap": file_of("{" + GOOD + "," + entry(offsets="[9,17]", name='"u"') + "}", bytes(17))})
add("offsets", "overlap", **{
    str(at): file_of("{" + GOOD + "," + entry(offsets=f"[{at},{at + 8}]", name='"u"') + "}",
                     bytes(at + 8)) for at in (0, 1, 4, 7)})
for dtype, bits in BITS.items():
    size = 8 * bits // 8
    add("span", "needs", **{f"{dtype} one byte more": tensor(
        size + 1, dtype=f'"{dtype}"', offsets=f"[0,{size + 1}]")})
    add("span", "needs", **{f"{dtype} one byte less": tensor(
        size - 1, dtype=f'"{dtype}"', offsets=f"[0,{size - 1}]")})
add("span", "does not fill whole bytes", **{
    f"{dtype} {n}": tensor(8, dtype=f'"{dtype}"', shape=f"[{n}]")
    for dtype in ("F4", "F6_E2M3", "F6_E3M2") for n in (1, 3, 7)})
add("span", "overflows 63 bits", **{
    shape: tensor(8, shape=shape) for shape in (
        "[4294967296,4294967296]", "[2305843009213693953,8]", "[9223372036854775807]",
        "[1152921504606846976]", "[65536,65536,65536,65536]", "[0,4611686018427387904]",
        "[9223372036854775807,9223372036854775807,0]", "[3037000500,3037000500]")})
add("span", "more than 32 dimensions", **{
    str(n): tensor(shape="[" + ",".join(["1"] * n) + "]") for n in (33, 1000, 10**5)})
add("dtype", "unknown dtype", **{
    text: tensor(dtype=text) for text in (
        '""', '"u8"', '"FP8"', '"F8"', '"BF16 "', '"int8"', '"F128"', '"\\u0055"')})
VALUES = ("null", "true", "1", '"x"', "[]", "{}")
add("type", "must be an object", **{
    f"entry {value}": file_of('{"t":' + value + "}") for value in VALUES[:5]})
add("type", "must be a string", **{
    f"dtype {value}": tensor(dtype=value) for value in ("null", "true", "1")})
for field in ("shape", "offsets"):
    add("type", "must be an array|nested deeper", **{
        f"{field} {value}": tensor(**{field: value}) for value in ("null", "true", "1", '"x"')})
add("type", "must be a string", **{
    f"metadata {value}": file_of('{"__metadata__":{"a":' + value + "}}")
    for value in ("null", "true", "1", "1.5")})
add("field", "unknown field", **{
    name: file_of('{"t":{"dtype":"U8","shape":[8],"data_offsets":[0,8],"' + name + '":1}}',
                  bytes(8)) for name in ("x", "Shape", "dtype ", "")})
add("field", "is missing|must hold two", **{
    "nothing": file_of('{"t":{}}'), "no dtype": file_of('{"t":{"shape":[],"data_offsets":[0,0]}}'),
    "no shape": file_of('{"t":{"dtype":"U8","data_offsets":[0,0]}}'),
    "no offsets": file_of('{"t":{"dtype":"U8","shape":[0]}}')})
add("name", "the limit is 65536", long=file_of("{" + entry(name=f'"{"n" * 65537}"') + "}",
                                                bytes(8)))

INDEXES = {
    **{name: "one plain file name" for name in (
        "../x.safetensors", "/etc/passwd", "a/../../b.safetensors", "a/b.safetensors", "", ".",
        "..", "a\\b.safetensors", "C:\\x.safetensors", "/dev/zero", "//x", "./m.safetensors")},
    "nul\0.safetensors": "one plain file name|NUL",
    **{name: "cannot open" for name in ("missing.safetensors", "loop.safetensors")},
    **{name: "not a regular file" for name in ("pipe.safetensors", "folder.safetensors",
                                               "zero.safetensors")},
}
INDEX_TEXTS = {
    "": "invalid JSON", "[]": "must be an object", "{}": "no 'weight_map'",
    '{"weight_map":{}}': "is empty", '{"weight_map":[]}': "must be an object",
    '{"weight_map":null}': "must be an object", '{"weight_map":{"t":1}}': "must be a string",
    '{"weight_map":{"t":null}}': "must be a string", '{"weight_map":{"t":{}}}': "string|object",
    '{"weight_map":{"t":"m.safetensors","t":"m.safetensors"}}': "duplicate key",
    '{"weight_map":{"t":"m.safetensors"},"weight_map":{"t":"m.safetensors"}}': "duplicate key",
    '{"weight_map":{"absent":"m.safetensors"}}': "is not in its file",
    '{"weight_map":{"t":"m.safetensors","u":"M.safetensors"}}': "cannot open|in case only",
    '{"weight_map":{"t":"m.safetensors"}}x': "invalid JSON",
    '\ufeff{"weight_map":{"t":"m.safetensors"}}': "byte order mark",
}
CONFIGS = {
    "": "invalid JSON", "[]": "must be an object", "null": "must be an object",
    '{"a":1,"a":2}': "duplicate key", "[" * 100_000: "must be an object",
    '{"a":' * 100 + "1" + "}" * 100: "nested deeper", "{\0}": "NUL", "{}x": "invalid JSON",
    "\ufeff{}": "byte order mark", '{"a":"' + "x" * 2**24 + '"}': "the limit is",
}


def check(path, expected, names):
    result = run("inspect", path)
    assert result.returncode == INPUT, result
    assert result.stdout == ""
    assert names in result.stderr
    assert any(part in result.stderr for part in expected.split("|")), result.stderr


def test_the_corpus_is_large():
    assert len(FILES) + len(INDEXES) + len(INDEX_TEXTS) + len(CONFIGS) >= 250


@pytest.mark.parametrize("group", sorted({name.split(":")[0] for name in FILES}))
def test_files(tmp_path, group):
    path = tmp_path / "case.safetensors"
    for name, (content, expected) in FILES.items():
        if name.split(":")[0] != group:
            continue
        path.write_bytes(content)
        check(path, expected, "case.safetensors")


@pytest.fixture(name="model")
def make_model(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    write_safetensors(model / "m.safetensors", {"t": ("U8", [8], bytes(8))})
    (model / "loop.safetensors").symlink_to("loop.safetensors")
    (model / "zero.safetensors").symlink_to("/dev/zero")
    (model / "folder.safetensors").mkdir()
    os.mkfifo(model / "pipe.safetensors")
    return model


def test_indexes(model):
    index = model / "x.safetensors.index.json"
    for name, expected in INDEXES.items():
        index.write_text(json.dumps({"weight_map": {"t": name}}))
        check(model, expected, str(model))
    for text, expected in INDEX_TEXTS.items():
        index.write_text(text)
        check(model, expected, str(model))
    index.write_text('{"weight_map":{"t":"m.safetensors"}}')
    assert run("inspect", model).returncode == DONE


def test_configs(tmp_path):
    write_safetensors(tmp_path / "m.safetensors", {"t": ("U8", [8], bytes(8))})
    config = tmp_path / "config.json"
    for text, expected in CONFIGS.items():
        config.write_text(text)
        check(tmp_path, expected, "config.json")
