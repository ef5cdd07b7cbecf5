"""The compiled kernels as functions."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_float, c_int, c_int64, c_void_p
from typing import NamedTuple

# Brings the OpenMP runtime that the kernels then share, with its threads.
import torch  # noqa: F401

from tpserve.native.build import built_library
from tpserve.native.signatures import DTYPES, PANEL_WIDTH, SIGNATURES

__all__ = ["DTYPES", "Decode", "Kernels", "load_kernels"]


class Decode(ctypes.Structure):
    """The argument of the kernel ``decode``."""

    _fields_ = [
        ("queries", c_void_p),
        ("stride", c_int64),
        ("out", c_void_p),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("page_table", c_void_p),
        ("max_pages", c_int64),
        ("slots", c_void_p),
        ("lengths", c_void_p),
        ("sequences", c_int64),
        ("q_heads", c_int64),
        ("kv_heads", c_int64),
        ("size", c_int64),
        ("page_size", c_int64),
        ("window", c_int64),
        ("scale", c_float),
        ("soft_cap", c_float),
    ]


class Kernels(NamedTuple):
    """The kernels for one dtype.

    Attributes:
        panel_width: how many outputs of a weight lie side by side in a panel.
    """

    panel_width: int
    linear: Callable[..., None]
    rms_norm: Callable[..., None]
    add_rms_norm: Callable[..., None]
    rotate_and_store: Callable[..., None]
    silu_and_mul: Callable[..., None]
    decode: Callable[..., None]


def load_kernels(dtype: str) -> Kernels:
    """Load the kernels for one of DTYPES.

    Raises:
        UnavailablePlugin: they cannot be compiled.
        ModelError: the cache cannot be written.
    """
    library = ctypes.CDLL(str(built_library()))

    def find(name: str) -> Callable[..., None]:
        address = c_void_p.in_dll(library, f"{name}_{dtype}").value
        assert address is not None
        return ctypes.CFUNCTYPE(None, *SIGNATURES[name])(address)

    return Kernels(c_int.in_dll(library, PANEL_WIDTH).value, *(find(name) for name in SIGNATURES))
