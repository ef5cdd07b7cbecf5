"""The ops compute what the contract says, on the CPU in Triton's interpreter."""

from __future__ import annotations

import msgspec
import pytest
import torch

from tpserve.api import NoOptions
from tpserve.ops.noise import row_keys, uniforms
from tpserve.testing.draws import kept_tokens, sampling_batch
from tpserve.testing.ops import OpsContract
from tpserve.testing.package import PackageContract
from tpserve_attn_triton.plugin import tpserve_ops

pytest.importorskip("triton")

from tpserve_attn_triton import linear as launches
from tpserve_attn_triton import ops
from tpserve_attn_triton.device import device_of
from tpserve_attn_triton.ops import Tiles, TritonOps
from tpserve_attn_triton.shapes import Block, Blocks, choose_parts, choose_wide

SPEC = tpserve_ops()[0]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def large_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter takes about as long for a large block as for a small one."""
    if DEVICE == "cpu":
        monkeypatch.setattr(launches, "choose_blocks", lambda *_: Blocks(Block(64, 256, 1), Block(64, 64, 2)))
        monkeypatch.setattr(ops, "_HEADS", 32)


class TestPackage(PackageContract):
    plugin = "ops.triton"


class TestTritonOps(OpsContract):
    capabilities = msgspec.structs.replace(SPEC.capabilities, dtypes=("float32", "bfloat16"))
    device = DEVICE
    tokens = (1, 3)
    vocabularies = (1500,)
    draws = ((-(1 << 63), 1 << 33), (5, 1))
    rows = 300 if DEVICE == "cuda" else 20

    def make(self) -> TritonOps:
        return TritonOps(NoOptions())


@pytest.mark.parametrize("rows", [3, 67])
def test_the_parts_of_a_product_are_added_up(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "choose_blocks", lambda *_: Blocks(Block(64, 256, 1), None))
    monkeypatch.setattr(launches, "choose_parts", lambda *_: 2)
    product = TritonOps(NoOptions()).linear_in_parts(torch.ones(96, 64, dtype=torch.bfloat16, device=DEVICE))
    assert product(torch.ones(rows, 64, dtype=torch.bfloat16, device=DEVICE)).shape == (2, rows, 96)
    TestTritonOps().test_a_product_in_parts_is_added_up("bfloat16", rows, bias=False)
    TestTritonOps().test_a_product_in_parts_is_rotated("bfloat16", rows)


@pytest.mark.parametrize("most", [2, 64])
@pytest.mark.parametrize("filters", [{"top_k": 9}, {"top_p": 0.3}, {"top_k": 400, "top_p": 0.9}], ids=str)
def test_thresholds_are_found_in_few_tiles_or_in_all(filters: dict[str, float], most: int) -> None:
    triton_ops = TritonOps(NoOptions())
    triton_ops._tiles = Tiles(size=16, most=most, rows=8)
    logits = torch.randn(1, 600, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(DEVICE) * 3
    batch = sampling_batch([{"temperature": 2.0, **filters}], DEVICE)
    found = triton_ops._thresholds(logits.float(), batch, device_of(torch.device(DEVICE)))
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


@pytest.mark.parametrize(("most", "fewer"), [(16, (2, 7)), (32, (17, 20)), (64, (33, 50)), (128, (65, 100))], ids=str)
def test_few_rows_have_the_same_bits_in_any_batch(
    most: int, fewer: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, x = draw(24, 512), draw(most, 512)
    for turned in (False, True):
        monkeypatch.setattr(launches, "choose_wide", in_tiles)
        monkeypatch.setattr(launches, "is_turned", lambda *_, turned=turned: turned)
        linear = TritonOps(NoOptions()).linear_in_parts(weight)
        found = linear(x)
        for rows in fewer:
            assert torch.equal(linear(x[:rows]), found[..., :rows, :])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("rows", "turned"), [(2, False), (16, True), (17, False), (33, True), (128, False)])
def test_some_rows_are_multiplied_in_tiles(
    rows: int, turned: bool, gated: bool, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def choose(out: int, columns: int, room: int, **how: bool) -> Block:
        asked.append(room)
        return in_tiles(out, columns, room, **how)

    monkeypatch.setattr(launches, "choose_wide", choose)
    monkeypatch.setattr(launches, "is_turned", lambda *_: turned)
    weight, x, offset = draw(208, 264) / 16, draw(rows, 264, seed=2), draw(208, seed=3) if bias else None
    expected = x.double() @ weight.double().T + (0 if offset is None else offset.double())
    if gated:
        gate, up = expected.chunk(2, dim=-1)
        expected = gate * gate.sigmoid() * up
    triton_ops = TritonOps(NoOptions())
    bind = triton_ops.gated_linear if gated else triton_ops.linear if bias else triton_ops.linear_in_parts
    found = bind(weight, offset)(x)
    torch.testing.assert_close(found.double().view(rows, -1), expected, rtol=0.02, atol=0.02)
    assert asked == [next(room for room in (16, 32, 64, 128) if rows <= room)]


@pytest.mark.parametrize(("rows", "turned"), [(1, True), (7, False), (7, True)])
@pytest.mark.parametrize("parts", [2, 3])
def test_the_columns_of_tiles_are_divided_into_parts(
    parts: int, rows: int, turned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five blocks of columns, of which the last is not full: parts of three and two, or of two, two and one."""
    monkeypatch.setattr(launches, "choose_wide", lambda *_, **__: Block(64, 64, 4, 3, parts))
    monkeypatch.setattr(launches, "is_turned", lambda *_: turned)
    weight, x = draw(208, 264) / 16, draw(rows, 264, seed=2)
    found = TritonOps(NoOptions()).linear_in_parts(weight)(x)
    assert found.shape == (parts, rows, 208)
    torch.testing.assert_close(found.double().sum(0), x.double() @ weight.double().T, rtol=0.02, atol=0.03)


@pytest.mark.parametrize("rows", [0, 5, 67, 150])
@pytest.mark.parametrize("gated", [False, True])
def test_torch_multiplies_with_turned_weights_too(rows: int, gated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "is_turned", lambda *_: True)
    monkeypatch.setattr(launches, "choose_parts", lambda *_: 2)
    triton_ops, weight, x = TritonOps(NoOptions()), draw(48, 64) / 8, draw(rows, 64, seed=2)
    expected = x.double() @ weight.double().T
    if gated:
        gate, up = expected.chunk(2, dim=-1)
        torch.testing.assert_close(
            triton_ops.gated_linear(weight)(x).double(), gate * gate.sigmoid() * up, rtol=0.02, atol=0.02
        )
    else:
        found = triton_ops.linear_in_parts(weight)(x)
        assert found.shape == (2, rows, 48)
        torch.testing.assert_close(found.double().sum(0), expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    ("columns", "dtype", "offset", "offset_of_x"),
    [
        (260, torch.bfloat16, 0, 0),
        (264, torch.float32, 0, 0),
        (264, torch.bfloat16, 4, 0),
        (264, torch.bfloat16, 0, 4),
    ],
    ids=str,
)
def test_what_the_copy_engine_cannot_read_is_not_multiplied_in_tiles(
    columns: int, dtype: torch.dtype, offset: int, offset_of_x: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launches, "choose_wide", lambda *_, **__: pytest.fail("asked"))
    monkeypatch.setattr(launches, "is_turned", lambda *_: True)
    weight = draw(24 * columns + offset).to(dtype)[offset:].view(24, columns)
    x = draw(20 * columns + offset_of_x).to(dtype)[offset_of_x:].view(20, columns)
    found = TritonOps(NoOptions()).linear(weight)(x)
    torch.testing.assert_close(found.double(), x.double() @ weight.double().T, rtol=0.02, atol=0.2)


def test_tiles_and_parts_are_chosen_for_large_weights_alone() -> None:
    assert choose_wide(28_672, 4096, 64, gated=True)
    assert not choose_wide(28_672, 4096, 128, gated=True)
    assert choose_wide(28_672, 4096, 128, gated=True, turned=True)
    assert not choose_wide(4096, 14_336, 128, in_parts=True, turned=True)
    assert choose_wide(4096, 14_336, 32)
    assert not choose_wide(4096, 14_336, 64)
    assert not choose_wide(6144, 1024, 32, gated=True)
    assert not choose_wide(128_256, 4096, 32)
    assert [choose_parts(4096, 14_336, rows) for rows in (1, 64, 65, 384, 385)] == [1, 1, 2, 2, 1]
    assert [choose_parts(6144, 4096, rows) for rows in (160, 161, 232, 233)] == [1, 2, 2, 1]
    assert choose_parts(1024, 3072, 128) == choose_parts(28_672, 4096, 128) == 1


@pytest.mark.parametrize(
    ("out", "columns", "turned", "parts"),
    [
        (6144, 4096, False, 2),
        (4096, 4096, False, 2),
        (4096, 14_336, True, 4),
        (5120, 25_600, False, 3),
        (1024, 16_384, False, 4),
    ],
)
def test_parts_of_tiles_run_at_a_time(out: int, columns: int, turned: bool, parts: int) -> None:
    block = choose_wide(out, columns, 16, in_parts=True, turned=turned)
    assert block is not None
    assert block.parts == parts
    assert parts * out // block.rows <= 132


def test_only_what_is_activated_or_may_be_in_parts_is_turned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "is_turned", lambda *_: True)
    weight = draw(32, 64)
    shapes = [
        product.weight.shape
        for product in (
            launches.bind(weight),
            launches.bind(weight, gated=True),
            launches.bind(weight, in_parts=True),
            launches.bind(weight, draw(32), in_parts=True),
            launches.bind(draw(32, 60), gated=True),
            launches.bind(weight.float(), gated=True),
        )
    ]
    assert shapes == [(32, 64), (64, 32), (64, 32), (32, 64), (32, 60), (32, 64)]


def in_tiles(*_: int, gated: bool, **__: bool) -> Block:
    return Block(128 if gated else 64, 64, 4, 3)


def draw(*size: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(DEVICE, torch.bfloat16)
