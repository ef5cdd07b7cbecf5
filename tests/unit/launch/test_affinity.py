from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tpserve.config import ServeConfig
from tpserve.distributed import quota
from tpserve.errors import ConfigError
from tpserve.launch.affinity import Core, parse_cpus, place_ranks, usable_cores


def machine(nodes: int, cores: int, hyperthreads: int = 1) -> list[Core]:
    """Cores numbered as Linux does: all first threads before all second ones."""
    return [
        Core(core // (cores // nodes), (core // (cores // nodes), core), core + thread * cores)
        for thread in range(hyperthreads)
        for core in range(cores)
    ]


def test_one_rank_takes_all_cores_and_is_not_held() -> None:
    (place,) = place_ranks(ServeConfig(), "cpu", machine(1, 8))
    assert (place.device, place.threads, place.cpus) == ("cpu", 8, [])


def test_ranks_share_the_cores_out() -> None:
    places = place_ranks(ServeConfig(tp=2), "cpu", machine(1, 8))
    assert [(place.threads, place.cpus) for place in places] == [(4, [0, 1, 2, 3]), (4, [4, 5, 6, 7])]


def test_an_uneven_share_gives_all_ranks_the_same_threads() -> None:
    places = place_ranks(ServeConfig(tp=3), "cpu", machine(1, 8))
    assert [place.cpus for place in places] == [[0, 1], [2, 3, 4], [5, 6, 7]]
    assert {place.threads for place in places} == {2}


def test_hyperthreads_stay_together_and_count_once() -> None:
    places = place_ranks(ServeConfig(tp=2), "cpu", machine(1, 4, hyperthreads=2))
    assert [(place.threads, place.cpus) for place in places] == [(2, [0, 1, 4, 5]), (2, [2, 3, 6, 7])]


def test_shares_keep_to_numa_nodes() -> None:
    interleaved = [Core(cpu % 2, (cpu % 2, cpu), cpu) for cpu in range(8)]
    places = place_ranks(ServeConfig(tp=2), "cpu", interleaved)
    assert [place.cpus for place in places] == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_more_ranks_than_cores_are_not_held() -> None:
    places = place_ranks(ServeConfig(tp=3), "cpu", machine(1, 2))
    assert [(place.threads, place.cpus) for place in places] == [(1, [])] * 3


def test_none_and_threads() -> None:
    places = place_ranks(ServeConfig(tp=2, cpu_affinity="none", threads=3), "cpu", machine(1, 8))
    assert [(place.threads, place.cpus) for place in places] == [(3, [])] * 2


@pytest.mark.parametrize(
    ("config", "room"),
    [
        (ServeConfig(threads=8), 8),
        (ServeConfig(threads=4, tp=2), 4),
        (ServeConfig(threads=4, tp=2, cpu_affinity="none"), 4),
        (ServeConfig(threads=2, tp=2, cpu_affinity="0-2;5,7"), 2),
        (ServeConfig(threads=1, tp=9), 1),
    ],
)
def test_more_threads_than_cores_are_warned_about(
    config: ServeConfig, room: int, caplog: pytest.LogCaptureFixture
) -> None:
    cores = machine(1, 4, hyperthreads=2)
    place_ranks(config, "cpu", cores)
    place_ranks(msgspec.structs.replace(config, threads=1000), "cuda", cores)
    assert not caplog.records
    place_ranks(msgspec.structs.replace(config, threads=room + 1), "cpu", cores)
    (warning,) = caplog.records
    assert warning.getMessage().startswith(f"threads is {room + 1} and a rank's share of the cores {room}: ")


def test_lists() -> None:
    places = place_ranks(ServeConfig(tp=2, cpu_affinity="0-2;5,7"), "cpu", machine(1, 8))
    assert [(place.threads, place.cpus) for place in places] == [(2, [0, 1, 2]), (2, [5, 7])]


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        ("0-1", "1 lists of cores for 2 ranks"),
        ("0;9", "may not run on core 9"),
        ("0;x", "cpu_affinity is '0;x'"),
        ("0-99999999999999999999;1", "may not run on core 8"),
        ("x", "cpu_affinity is 'x', which lists no cores"),
        ("0;", "cpu_affinity is '0;'"),
        ("3-1;0", "cpu_affinity is '3-1;0'"),
    ],
)
def test_wrong_lists(lists: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        place_ranks(ServeConfig(tp=2, cpu_affinity=lists), "cpu", machine(1, 8))


def test_accelerators_are_numbered_from_the_base_in_steps() -> None:
    places = place_ranks(ServeConfig(tp=3, base_device=1, device_step=2), "cuda", machine(1, 8))
    assert [place.device for place in places] == ["cuda:1", "cuda:3", "cuda:5"]


def test_parse_cpus() -> None:
    assert list(parse_cpus("0-3,8,10-11")) == [0, 1, 2, 3, 8, 10, 11]


@pytest.mark.parametrize(("limit", "threads"), [("150000 100000", 1), ("50000 100000", 1), ("max 100000", None)])
def test_a_container_with_less_time_than_cores_gets_fewer_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, threads: int | None
) -> None:
    (tmp_path / "cpu.max").write_text(f"{limit}\n")
    monkeypatch.setattr(quota, "CGROUP", tmp_path)
    physical = len({core.physical for core in usable_cores()})
    assert place_ranks(ServeConfig(), "cpu")[0].threads == (threads or physical)


def test_this_machine_has_cores() -> None:
    assert usable_cores()
