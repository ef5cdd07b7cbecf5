"""What the compiled kernels are called and take. What the arguments mean is written beside them in C++."""

from __future__ import annotations

from ctypes import c_float, c_int, c_int64, c_void_p
from typing import Any

__all__ = ["DTYPES", "PANEL_WIDTH", "SIGNATURES", "SYMBOLS"]

DTYPES = ("float32", "bfloat16")

PANEL_WIDTH = "panel_width"

SIGNATURES: dict[str, tuple[Any, ...]] = {
    "linear": (c_void_p, c_int64, c_int64, c_int64, c_void_p, c_void_p, c_void_p, c_int64, c_int),
    "rms_norm": (c_void_p, c_void_p, c_int64, c_int64, c_float, c_void_p, c_int),
    "add_rms_norm": (c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_float, c_int),
    "rotate_and_store": (*[c_void_p] * 7, c_float, *[c_int64] * 4, c_int),
    "silu_and_mul": (c_void_p, c_int64, c_int64, c_void_p, c_int),
    "decode": (c_void_p, c_int),
}

SYMBOLS = (PANEL_WIDTH, *(f"{name}_{dtype}" for name in SIGNATURES for dtype in DTYPES))
"""All that the library must have."""
