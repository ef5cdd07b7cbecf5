"""How arms are written, and what is said of those that cannot be."""

from __future__ import annotations

import pytest

from tpserve.bench.transport.arms import ANCESTOR, matrix, read_arms
from tpserve.errors import ConfigError, UnknownPlugin, UnsupportedByPlugin
from tpserve.plugins.registry import Registry


@pytest.fixture(scope="module")
def registry() -> Registry:
    return Registry.discover()


def test_an_arm_is_a_transport_or_pairs(registry: Registry) -> None:
    arms = read_arms(["transport=zmq,sync=gloo", "nng , sync=gloo", "zmq,sync=gloo,transport.batch=4096"], {}, registry)

    assert [arm.name for arm in arms] == ["zmq+gloo", "nng+gloo", "zmq+gloo transport.batch=4096"]
    assert [arm.transport.options["batch"] for arm in arms if arm.transport] == [262144, 262144, 4096]


def test_all_options_are_told_and_an_arm_s_own_win(registry: Registry) -> None:
    options = {"transport": {"batch": "1000", "linger": "2"}, "transport.nng": {"linger": "3"}}
    zmq, nng = read_arms(["zmq,sync=gloo,transport.batch=5", "nng,sync=gloo,name=other"], options, registry)

    assert zmq.transport is not None
    assert zmq.transport.options == {"send_buffer": 64 << 20, "batch": 5, "io_threads": 1, "spin": 200, "linger": 2.0}
    assert nng.transport is not None
    assert nng.transport.options == {"send_buffer": 64 << 20, "batch": 1000, "linger": 3.0}
    assert nng.name == "other"


def test_a_sync_that_is_not_named_is_chosen(registry: Registry) -> None:
    [arm] = read_arms(["zmq"], {}, registry)

    assert arm.sync is not None
    assert arm.sync.reason == "auto"


def test_the_ancestor_has_no_parts(registry: Registry) -> None:
    arms = read_arms([ANCESTOR, f"{ANCESTOR},name=again"], {}, registry)

    assert [(arm.name, arm.transport, arm.sync) for arm in arms] == [("ancestor", None, None), ("again", None, None)]
    with pytest.raises(ConfigError, match="no parts or options"):
        read_arms([f"{ANCESTOR},sync=gloo"], {}, registry)


@pytest.mark.parametrize("text", [ANCESTOR, "zmq"])
def test_an_arm_against_itself_needs_a_name(registry: Registry, text: str) -> None:
    with pytest.raises(ConfigError, match="two arms are called") as caught:
        read_arms([text, text], {}, registry)

    assert "name=" in caught.value.hint
    assert len(read_arms([text, f"{text},name=again"], {}, registry)) == 2


@pytest.mark.parametrize("text", [ANCESTOR, "zmq"])
def test_the_second_of_a_pair_gets_a_name_of_its_own(registry: Registry, text: str) -> None:
    arms = read_arms([text, text], {}, registry, is_pair=True)

    assert [arm.name for arm in arms] == [arms[0].name, f"{arms[0].name} (2)"]
    with pytest.raises(ConfigError, match="two arms are called x"):
        read_arms([f"{text},name=x", f"{text},name=x"], {}, registry, is_pair=True)
    with pytest.raises(ConfigError, match="two arms are called"):
        read_arms([text, f"{text},name=other", text], {}, registry, is_pair=True)


def test_a_matrix_has_every_combination() -> None:
    assert matrix(["transport=zmq,nng", "sync=gloo,shm"]) == [
        "transport=zmq,sync=gloo",
        "transport=zmq,sync=shm",
        "transport=nng,sync=gloo",
        "transport=nng,sync=shm",
    ]
    assert matrix([]) == []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("transprt=zmq", "Did you mean 'transport'"),
        ("zmq,nng", "expected transport once"),
        ("zmq,sync=", "expected sync once, with a value"),
        ("zmq,transport.=3", "is nothing that an arm has"),
        ("zmq,transport.bach=3", "transport.zmq has no option 'bach'"),
        ("zmq,transport.batch=many", "option transport.zmq.batch: expected an integer"),
        ("zmq,policy.window=3", "is nothing that an arm has"),
    ],
)
def test_a_wrong_arm_is_refused(registry: Registry, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read_arms([text], {}, registry)


def test_parts_that_cannot_do_it_are_refused(registry: Registry) -> None:
    with pytest.raises(UnknownPlugin, match="no transport plugin named 'zqm'"):
        read_arms(["zqm"], {}, registry)
    with pytest.raises(UnsupportedByPlugin, match="one process only"):
        read_arms(["inproc"], {}, registry)
    with pytest.raises(ConfigError, match="two arms are called x"):
        read_arms(["zmq,sync=gloo,name=x", "nng,sync=gloo,name=x"], {}, registry)
    with pytest.raises(ConfigError, match="no axis"):
        matrix(["transport"])
