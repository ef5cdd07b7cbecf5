"""Without a CUDA device the kernels run in Triton's interpreter, as Triton must know when it is first imported."""

from __future__ import annotations

import importlib.util

import pytest
import torch

if importlib.util.find_spec("triton") and not torch.cuda.is_available():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")  # child processes of other tests should not see it
        import triton

        triton.knobs.runtime.interpret = True
