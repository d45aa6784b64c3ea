"""Packs the measured reciprocal table into two bits an entry, for embedding.

Input: gzip of 2^23 signed bytes, entry m = bits(rcp.approx.ftz(1.m)) - bits(RN(1 / 1.m)).
Output: 2^21 bytes, entry m in bits 2 * (m % 4) of byte m / 4: 0, 1 for +1, 2 for -1.

    python3 tools/pack_rcp_table.py IN.i8.gz OUT.bin
"""

import gzip
import hashlib
import sys
from pathlib import Path

RAW_SHA256 = "862bea101da795bf5fd46df9dfe5142a79c29edd831e2da30aa84385d885e8fe"


def main() -> None:
    source, target = map(Path, sys.argv[1:])
    raw = gzip.decompress(source.read_bytes())
    if hashlib.sha256(raw).hexdigest() != RAW_SHA256:
        sys.exit(f"{source}: not the published reciprocal table (SHA-256 differs)")
    codes = raw.translate(bytes.maketrans(b"\x01\xff", b"\x01\x02"))
    packed = bytearray(len(codes) // 4)
    lanes = [codes[lane::4] for lane in range(4)]
    for index, (a, b, c, d) in enumerate(zip(*lanes)):
        packed[index] = a | b << 2 | c << 4 | d << 6
    target.write_bytes(packed)


if __name__ == "__main__":
    main()
