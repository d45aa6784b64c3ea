"""NVFP4's 4-over-6 as FlashInfer spells it: a recipe, an argument that may be left out, a code.

A block of 16 numbers gets the scale of its maximum over 6 or over 4, whichever makes the smaller
error. The argument `nvfp4_4over6` is a NVFP44Over6Config, None for off, or left out: then
FlashInfer's environment variables count.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

FLOAT4_E2M1_MAX = 6.0
FLOAT8_E4M3_MAX = 448.0
NVFP4_4OVER6_CODE_FROM_ENV = -1
NVFP4_4OVER6_CODE_STANDARD = 0
NVFP4_4OVER6_KNOWN_BITS = 5  # Bits that a code may have.


class NVFP44Over6ErrMode(IntEnum):
    """The error that chooses a block's scale: the sum of absolute or of squared errors."""

    MAE = 0
    MSE = 1

    def __repr__(self) -> str:
        return f"{type(self).__name__}.{self.name}"


class _Unset:
    """The type of UNSET."""

    def __repr__(self) -> str:
        return "<left out: FLASHINFER_NVFP4_4OVER6* count>"

    def __reduce__(self) -> str:
        return "UNSET"


UNSET: Any = _Unset()  # The default of `nvfp4_4over6`: the argument was left out.


@dataclass(frozen=True)
class NVFP44Over6Config:
    """A 4-over-6 recipe.

    e4m3_max: 448 or 256, the largest block scale; the global scale is 1 / (6 * e4m3_max) with it.
    err_mode: NVFP44Over6ErrMode, or its name. err_use_fast_math: errors in float16.
    """

    e4m3_max: int = 448
    err_mode: NVFP44Over6ErrMode | str = NVFP44Over6ErrMode.MAE
    err_use_fast_math: bool = False

    def __post_init__(self) -> None:
        if self.e4m3_max not in (256, 448):
            raise ValueError(f"e4m3_max: must be either 256 or 448, got {self.e4m3_max}")
        try:
            mode = (NVFP44Over6ErrMode[self.err_mode.upper()] if isinstance(self.err_mode, str)
                    else NVFP44Over6ErrMode(self.err_mode))  # fmt: skip
        except (KeyError, ValueError):
            raise ValueError(f"err_mode: must be MAE or MSE, got {self.err_mode!r}") from None
        object.__setattr__(self, "err_mode", mode)

    @property
    def err_mode_name(self) -> str:
        """MAE or MSE."""
        return self.err_mode if isinstance(self.err_mode, str) else self.err_mode.name


def env_flag_enabled(name: str) -> bool:
    """Whether an environment variable is "1"."""
    return os.environ.get(name) == "1"


def current_nvfp4_4over6_config() -> NVFP44Over6Config | None:
    """The recipe of the environment variables; None where they ask for none."""
    if not env_flag_enabled("FLASHINFER_NVFP4_4OVER6"):
        return None
    mode = os.environ.get("FLASHINFER_NVFP4_4OVER6_ERR_MODE", "MAE")
    if mode.upper() not in ("MAE", "MSE"):
        raise ValueError(f"FLASHINFER_NVFP4_4OVER6_ERR_MODE: expected MAE or MSE, got {mode!r}")
    is_small = env_flag_enabled("FLASHINFER_NVFP4_4OVER6_E4M3_USE_256")
    is_fast = env_flag_enabled("FLASHINFER_NVFP4_4OVER6_ERR_USE_FAST_MATH")
    return NVFP44Over6Config(256 if is_small else 448, mode, is_fast)


def resolve_nvfp4_4over6(setting: Any = UNSET) -> NVFP44Over6Config | None:
    """The recipe of `setting`, an argument `nvfp4_4over6`; None: off. Else TypeError."""
    if setting is UNSET:
        return current_nvfp4_4over6_config()
    if setting is None or isinstance(setting, NVFP44Over6Config):
        return setting
    raise TypeError(
        "nvfp4_4over6: must be an NVFP44Over6Config or None, or left out; got "
        f"{type(setting).__name__}"
    )


def nvfp4_e4m3_max(nvfp4_4over6_config: NVFP44Over6Config | None = None) -> float:
    """The largest block scale of a recipe; 448 without one."""
    return float(448 if nvfp4_4over6_config is None else nvfp4_4over6_config.e4m3_max)


def nvfp4_per_token_scale_inv(nvfp4_4over6_config: NVFP44Over6Config | None) -> float:
    """The decode scale of a row whose maximum is 1: 1 / (6 * largest block scale)."""
    return 1.0 / (nvfp4_e4m3_max(nvfp4_4over6_config) * FLOAT4_E2M1_MAX)


def nvfp4_4over6_code(config: NVFP44Over6Config | None) -> int:
    """A recipe as a number: bit 0 on, 1 a largest scale of 256, 2 and 3 err_mode, 4 fast."""
    if config is None:
        return NVFP4_4OVER6_CODE_STANDARD
    mode = int(NVFP44Over6ErrMode[config.err_mode_name])
    return (1 | int(config.e4m3_max == 256) << 1 | mode << 2
            | int(config.err_use_fast_math) << 4)  # fmt: skip


def nvfp4_4over6_from_code(code: int) -> Any:
    """The recipe of a number; UNSET for -1. ValueError for numbers without a meaning."""
    if code == NVFP4_4OVER6_CODE_FROM_ENV:
        return UNSET
    if code < 0 or code >> NVFP4_4OVER6_KNOWN_BITS:
        raise ValueError(f"code: expected -1 to {(1 << NVFP4_4OVER6_KNOWN_BITS) - 1}, got {code}")
    if not code & 1:
        return None
    if code >> 2 & 3 > 1:
        raise ValueError(f"code: expected the error mode 0 or 1, got {code >> 2 & 3}")
    return NVFP44Over6Config(256 if code & 2 else 448, NVFP44Over6ErrMode(code >> 2 & 3),
                             bool(code & 16))  # fmt: skip
