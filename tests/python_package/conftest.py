"""New arrays of any contents hold no zeros in these tests, as they may outside of them.

Fresh memory of a process is zero, so a byte that a call leaves unwritten would go unnoticed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from narrowfloat._arrays import NumpyMaker, TorchMaker

POISON = 0xA5


@pytest.fixture(autouse=True)
def poisoned_results() -> Iterator[None]:
    """The arrays that the package allocates for results, but for operators of torch."""
    numpy_empty, torch_empty = NumpyMaker.empty, TorchMaker.empty

    def of_numpy(self: NumpyMaker, shape: Any, dtype: Any) -> Any:
        array = numpy_empty(self, shape, dtype)
        array.reshape(-1).view(np.uint8)[...] = POISON
        return array

    def of_torch(self: TorchMaker, shape: Any, dtype: Any) -> Any:
        import torch

        tensor = torch_empty(self, shape, dtype)
        tensor.reshape(-1).view(torch.uint8).fill_(POISON)
        return tensor

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NumpyMaker, "empty", of_numpy)
        patch.setattr(TorchMaker, "empty", of_torch)
        yield
