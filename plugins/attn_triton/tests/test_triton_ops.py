"""The ops compute what the contract says, on the CPU in Triton's interpreter."""

from __future__ import annotations

import msgspec
import pytest
import torch

from tpserve.api import NoOptions
from tpserve.ops.noise import row_keys, uniforms
from tpserve.testing.ops import OpsContract, kept_tokens, sampling_batch
from tpserve.testing.package import PackageContract
from tpserve_attn_triton.plugin import tpserve_ops

pytest.importorskip("triton")

from tpserve_attn_triton import ops
from tpserve_attn_triton.ops import Tiles, TritonOps, _device
from tpserve_attn_triton.shapes import Block, Blocks

SPEC = tpserve_ops()[0]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def large_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter takes about as long for a large block as for a small one."""
    if DEVICE == "cpu":
        monkeypatch.setattr(ops, "choose_blocks", lambda *_: Blocks(Block(64, 256, 1), Block(64, 64, 2)))
        monkeypatch.setattr(ops, "_HEADS", 32)


class TestPackage(PackageContract):
    plugin = "ops.triton"


class TestTritonOps(OpsContract):
    capabilities = msgspec.structs.replace(SPEC.capabilities, dtypes=("float32", "bfloat16"))
    device = DEVICE
    tokens = (1, 3)
    vocabularies = (1500,)
    draws = ((-(1 << 63), 1 << 33), (5, 1))

    def make(self) -> TritonOps:
        return TritonOps(NoOptions())


@pytest.mark.parametrize("most", [2, 64])
@pytest.mark.parametrize("filters", [{"top_k": 9}, {"top_p": 0.3}, {"top_k": 400, "top_p": 0.9}], ids=str)
def test_thresholds_are_found_in_few_tiles_or_in_all(filters: dict[str, float], most: int) -> None:
    triton_ops = TritonOps(NoOptions())
    triton_ops._tiles = Tiles(size=16, most=most, rows=8)
    logits = torch.randn(1, 600, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(DEVICE) * 3
    batch = sampling_batch([{"temperature": 2.0, **filters}], DEVICE)
    found = triton_ops._thresholds(logits.float(), batch, _device(torch.device(DEVICE)))
    assert torch.equal(logits[0] >= found.item() - 1e-6, kept_tokens(logits[0] / 2, **filters))


def test_the_noise_has_the_bits_of_its_definition() -> None:
    """Even logits: what is drawn is where the uniform number is largest, wherever that is."""
    seeds, positions = torch.tensor([0, -1, 1 << 62, 77]), torch.tensor([0, 1 << 40, 3, 99])
    batch = sampling_batch(
        [{"seed": int(seed), "position": int(position)} for seed, position in zip(seeds, positions, strict=True)],
        DEVICE,
    )
    drawn = TritonOps(NoOptions()).sample(torch.zeros(4, 3000, device=DEVICE), batch)
    assert torch.equal(drawn.cpu(), uniforms(row_keys(seeds, positions), 3000).argmax(dim=1))


def test_few_rows_have_the_same_bits_in_any_batch() -> None:
    numbers = torch.Generator().manual_seed(1)
    weight, x = (torch.randn(rows, 512, generator=numbers).to(DEVICE, torch.bfloat16) for rows in (24, 16))
    linear = TritonOps(NoOptions()).linear(weight)
    found = linear(x)
    for rows in (2, 7):
        assert torch.equal(linear(x[:rows]), found[:rows])
