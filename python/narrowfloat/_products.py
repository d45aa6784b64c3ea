"""The product of rows with one matrix of packed weights: the grouped GEMM of one group."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

from narrowfloat import _core
from narrowfloat._arrays import Maker, TorchMaker, codes_to_core, maker_of, to_core
from narrowfloat._moe import aligned_bytes
from narrowfloat._streams import allocating_on

_ROWS = 1 << 16
_LEAST_TILE = 8


@dataclass(frozen=True)
class TileTable:
    """Numbers on a device of which the tiles of one group are views, so that a call makes none.

    counts: int32 0, 1, .., 65536. zeros: int32, one for each tile of so many rows.
    """

    counts: Any
    zeros: Any

    @classmethod
    def of(cls, device: Any) -> TileTable:
        """The tensors of a device, the same ones every time.

        The first call must not be within the capture of a CUDA graph.
        """
        found = _tables.get(str(device))
        if found is None:
            make = TorchMaker(device)
            found = cls(make.from_numpy(np.arange(_ROWS + 1, dtype=np.int32)),
                        make.zeros((_ROWS // _LEAST_TILE,), "int32"))  # fmt: skip
            _tables[str(device)] = found
        return found


_tables: dict[str, TileTable] = {}


def _new_tiles(make: Maker, rows: int, tile: int, count: int) -> dict[str, Any]:
    if not isinstance(make, TorchMaker):
        ends = np.minimum(np.arange(1, count + 1) * tile, rows).astype(np.int32)
        return {"tile_to_expert": np.zeros(count, np.int32), "tile_row_end": ends,
                "num_tiles": np.full(1, count, np.int32)}  # fmt: skip
    torch = sys.modules["torch"]
    with allocating_on(make.device):
        numbers = torch.arange(1, count + 1, dtype=torch.int32, device=make.device)
        return {"tile_to_expert": torch.zeros_like(numbers),
                "tile_row_end": (numbers * tile).clamp_(max=rows),
                "num_tiles": numbers[count - 1 :]}  # fmt: skip


def _tiles(make: Maker, rows: int, tile: int, table: TileTable | None) -> dict[str, Any]:
    """The tiles of rows 0, 1, .. of one group, as the members of a permutation without maps."""
    count = -(-rows // tile)
    if table is None or rows > _ROWS or not isinstance(make, TorchMaker):
        return _new_tiles(make, rows, tile, count)
    ends = table.counts[rows : rows + 1]
    if count > 1:
        with allocating_on(make.device):
            ends = (table.counts[1 : count + 1] * tile).clamp_(max=rows)
    return {"tile_to_expert": table.zeros[:count], "tile_row_end": ends,
            "num_tiles": table.counts[count : count + 1]}  # fmt: skip


def multiply_rows(
    weights: _core.GroupedWeights, rows: Any, scales: Any, dtype: str, *, row_scale: Any = None,
    scale: Any = 1.0, bias: Any = None, table: TileTable | None = None,
) -> Any:  # fmt: skip
    """[T, n] of float32 or bfloat16: scale * row_scale * (rows @ weights.T) + bias.

    rows: in the form of the weights' mode, [T, k], with scales [T, blocks] of any strides, or None.
    row_scale: float32 [T]. scale: a number, or float32 [1]. bias: float32 or bfloat16 [n].
    Where sums are added to or rounded: moe spec 6.1.
    """
    tokens, make = rows.shape[0], maker_of("a", rows)
    out = make.empty((tokens, weights.rows), dtype)
    if tokens == 0:
        return out
    tile = _core.default_token_tile(tokens, 1, 1)
    weights.run(
        codes_to_core("a", rows), None if scales is None else to_core("a_scale", scales),
        row_scale, tile, _tiles(make, tokens, tile, table), scale,
        None if bias is None else to_core("bias", bias.reshape(1, -1)), to_core("output", out),
        aligned_bytes(make, weights.workspace(tokens)),
    )  # fmt: skip
    return out
