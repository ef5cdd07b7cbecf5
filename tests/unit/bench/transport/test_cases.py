"""Sweeps, arrivals, and messages of an exact size."""

from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np
import pytest
import xxhash

from tpserve.bench.transport.arrivals import Arrival, bursts, read_trace
from tpserve.bench.transport.cases import Case, Load, make_cases, read_numbers, read_sizes
from tpserve.bench.transport.messages import Mint
from tpserve.envelope import Opener
from tpserve.errors import ConfigError
from tpserve.messages import Abort, Generate, decode_rank
from tpserve.tokens import unpack_ids


def test_sizes_and_numbers_are_read() -> None:
    assert read_sizes("64, 300,4K,16MiB,1m") == [64, 300, 4096, 16 << 20, 1 << 20]
    assert read_numbers("0, 1,32", "--messages") == [0, 1, 32]
    for text in ("63", "2G", "64 bytes", "", "-1"):
        with pytest.raises(ConfigError, match="--size"):
            read_sizes(text)
    with pytest.raises(ConfigError, match="--messages"):
        read_numbers("1,x", "--messages")


def test_a_sweep_is_every_combination_and_empty_rounds_have_no_size() -> None:
    cases = make_cases(Load(), [0, 1, 32], [300, 64], 100)

    assert cases == [Case(0, 0, 100), *(Case(count, size, 100) for count in (1, 32) for size in (64, 300))]
    assert [str(case) for case in cases[:2]] == ["empty rounds", "1 × 64 B"]


def test_large_rounds_are_fewer() -> None:
    [small, large] = make_cases(Load(), [1], [300, 16 << 20], 1000)

    assert (small.rounds, large.rounds) == (1000, 64)
    assert make_cases(Load(pace="free"), [32], [16 << 20], 1000)[0].rounds == 20
    assert make_cases(Load(), [32], [16 << 20], 5)[0].rounds == 5


def test_bursts_come_at_the_rate() -> None:
    arrivals = bursts(5000, 4, 300, 2000.0, Random(1))
    times = np.array([arrival.at for arrival in arrivals])

    assert len(arrivals) == 20_000
    assert times[-1] == pytest.approx(10.0, rel=0.05)
    assert np.array_equal(times[::4], times[3::4])
    gaps = np.diff(times[::4])
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.05), "gaps of a Poisson process vary as much as their mean"


def test_a_trace_is_read(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text('{"at": 0.0}\n\n{"at": 0.5, "size": 4096}\n')

    assert read_trace(file, 300) == [Arrival(0.0, 300), Arrival(0.5, 4096)]
    [case] = make_cases(Load(pace="trace", trace=file), [1], [300], 1000)
    assert case == Case(1, 300, 2, "a trace of 300 B to 4 KiB", xxhash.xxh3_64_hexdigest(file.read_bytes()))
    file.write_text('{"at": 0.0, "size": 100}\n')
    assert [str(case) for case in make_cases(Load(pace="trace", trace=file), [1], [300], 1000)] == ["a trace of 100 B"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "has no messages"),
        ('{"at": -1}', "line 1"),
        ('{"at": 1e30}', "line 1"),
        ('{"at": 1}\n{"at": 0.5}', "line 2: earlier"),
        ('{"at": 1, "size": 10}', "line 1: a message has at least 64 bytes"),
        ("nonsense", "line 1"),
        ('{"more": ' + 5000 * "[" + 5000 * "]" + "}", "line 1: nested too deep"),
    ],
)
def test_a_wrong_trace_is_refused(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(text)

    with pytest.raises(ConfigError, match=says):
        read_trace(file, 300)


def test_loads_and_numbers_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--messages 0"):
        make_cases(Load(pace="poisson"), [0, 1], [300], 10)
    with pytest.raises(ConfigError, match="needs --trace"):
        make_cases(Load(pace="trace"), [1], [300], 10)
    with pytest.raises(ConfigError, match="one --size"):
        make_cases(Load(pace="trace", trace=tmp_path / "x"), [1], [300, 400], 10)
    with pytest.raises(ConfigError, match="No such file"):
        make_cases(Load(pace="trace", trace=tmp_path / "x"), [1], [300], 10)


def test_messages_have_the_size_that_is_wanted() -> None:
    mint, opener = Mint(1), Opener()
    uids = set()
    for size in [*range(64, 600), 6299, 6300, *range(65_780, 65_840), *range(71_900, 71_960), 1 << 20]:
        frame = mint.frame(size)
        message = decode_rank(opener.open(frame))
        assert len(frame) == size
        assert isinstance(message, Generate | Abort)
        uids.add(message.uid)
        if size >= 300:
            assert isinstance(message, Generate)
            assert len(unpack_ids(message.prompt_ids)) >= min(2048, (size - 120) // 4 - 3)

    assert len(uids) == 536 + 2 + 60 + 60 + 1


def test_the_same_seed_makes_the_same_messages() -> None:
    assert Mint(3).frames(5, 300) == Mint(3).frames(5, 300)
    assert Mint(3).frames(5, 300) != Mint(4).frames(5, 300)
