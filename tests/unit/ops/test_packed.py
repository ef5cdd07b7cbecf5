from __future__ import annotations

import pytest
import torch

from tpserve.api import NoOptions
from tpserve.ops.packed import packed_linear
from tpserve.ops.reference import TorchOps

WEIGHT = torch.randn(48, 32, generator=torch.Generator().manual_seed(0))
X = torch.randn(3, 32, generator=torch.Generator().manual_seed(1))


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs a torch with oneDNN")
def test_float32_is_packed() -> None:
    linear = packed_linear(WEIGHT, None)
    assert linear is not None
    torch.testing.assert_close(linear(X), X @ WEIGHT.T)


def test_without_onednn_the_plain_product_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert packed_linear(WEIGHT, None) is None
    torch.testing.assert_close(TorchOps(NoOptions()).linear(WEIGHT)(X), X @ WEIGHT.T)


def test_dtypes_that_models_are_not_computed_in_are_left_as_they_are() -> None:
    weight, x = WEIGHT.double(), X.double()
    assert packed_linear(weight, None) is None
    torch.testing.assert_close(TorchOps(NoOptions()).linear(weight)(x), x @ weight.T)
