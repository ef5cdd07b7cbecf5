from __future__ import annotations

import socket
from pathlib import Path

import pytest
from tests.unit.launch.sample import MODEL, NONE, TWO

from tpserve.config import ServeConfig
from tpserve.errors import LaunchError
from tpserve.launch.banner import Banner, describe
from tpserve.launch.compose import resolve
from tpserve.launch.devices import Accelerators
from tpserve.launch.layout import Layout
from tpserve.launch.plan import Plan, rank_start
from tpserve.launch.post import ApiPost, Post, read_post, write_post
from tpserve.launch.protocol import Progress
from tpserve.launch.server import ServerCast, listen
from tpserve.plugins.registry import Registry
from tpserve.step import EngineLimits
from tpserve.weights.source import ModelFolder


def planned(config: ServeConfig, accelerators: Accelerators = NONE) -> Plan:
    composition = resolve(config, MODEL, Registry.discover(), accelerators)
    return Plan(config, ModelFolder(Path("/models/small"), "small"), MODEL, composition)


def test_a_free_port_is_taken_at_once() -> None:
    with listen("127.0.0.1", 0) as sock, socket.create_connection(sock.getsockname()):
        pass


def test_a_port_that_somebody_listens_on_is_busy() -> None:
    with listen("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        with pytest.raises(LaunchError, match=f"port {port} on 127.0.0.1 is already in use"):
            listen("127.0.0.1", port)


def test_the_port_of_a_server_that_has_just_ended_is_free() -> None:
    with listen("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        sock.accept()[0].close()
        client.close()
    listen("127.0.0.1", port).close()


def test_ipv6() -> None:
    with listen("::1", 0) as sock:
        assert sock.family == socket.AF_INET6


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(LaunchError, match=r"cannot listen on 192\.0\.2\.1 port 0"):
        listen("192.0.2.1", 0)
    for host in ("no.such.host.invalid", "a" * 300, "a..b"):
        with pytest.raises(LaunchError, match="is no address"):
            listen(host, 0)


def test_a_server_has_these_processes(tmp_path: Path) -> None:
    plan = planned(ServeConfig(tp=2, tokenizers=2, detokenizers=1, threads=3))
    with listen("127.0.0.1", 0) as sock:
        cast = ServerCast(plan, tmp_path, sock)
        api, group = cast.api(), cast.group(Layout(tmp_path, 2))
        assert api.descriptors == (sock.fileno(),)
    assert [start.spec.name for start in group] == ["rank0", "rank1", "tokenizer0", "tokenizer1", "detokenizer0"]
    assert [start.spec.place for start in group[:2]] == ["DP0 PP0 TP0", "DP0 PP0 TP1"]
    assert [start.environment["OMP_NUM_THREADS"] for start in group] == ["3", "3", "1", "1", "1"]
    assert all(start.environment["TOKENIZERS_PARALLELISM"] == "false" for start in group)
    posts = [read_post(start.spec.payload, Post) for start in group]
    assert [post.index for post in posts] == [0, 1, 0, 1, 0]
    assert {post.layout for post in posts} == {Layout(tmp_path, 2)}
    own = read_post(api.spec.payload, ApiPost)
    assert (own.model_name, own.post.config) == ("small", plan.config)


def test_clients_call_the_model_what_they_are_told(tmp_path: Path) -> None:
    plan = planned(ServeConfig(served_model_name="gpt"))
    with listen("127.0.0.1", 0) as sock:
        api = ServerCast(plan, tmp_path, sock).api()
    assert read_post(api.spec.payload, ApiPost).model_name == "gpt"


def test_posts_travel_whole(tmp_path: Path) -> None:
    post = planned(ServeConfig(tp=2, options={"transport": {"send_buffer": 4096}})).post(Layout(tmp_path, 1), 1)
    assert read_post(write_post(post), Post) == post
    assert rank_start(post).spec.cpus == post.composition.places[1].cpus


def test_the_banner_says_what_and_why() -> None:
    rows = {what: (which, why) for what, which, why in describe(planned(ServeConfig(tp=2, sync="gloo")))}
    assert rows["model"] == ("small", "/models/small")
    assert rows["shape"][0] == "2 layers, hidden 576, 9 query and 3 KV heads of 64"
    assert rows["tp"] == ("2", "6+3 query heads, 2+1 KV heads")
    assert rows["transport"][1].startswith("auto: the first of zmq, nng (tpserve-transport-zmq ")
    assert (rows["sync"][0], rows["comm"][0]) == ("gloo", "shm")
    assert rows["device"] == ("cpu", "auto: no NVIDIA driver")
    assert rows["dtype"][0] == "float32"


def test_the_banner_of_one_rank_says_what_is_not_needed() -> None:
    rows = {what: which for what, which, _ in describe(planned(ServeConfig()))}
    assert rows["transport"] == rows["sync"] == rows["comm"] == "none"
    assert rows["pipes"] == "zmq"


def test_the_banner_says_that_weights_are_random() -> None:
    assert ("weights", "random", "load_format is dummy") in describe(planned(ServeConfig(load_format="dummy")))
    assert "weights" not in {what for what, _, _ in describe(planned(ServeConfig()))}


def test_the_banner_names_devices_and_options() -> None:
    config = ServeConfig(tp=2, base_device=0, device_step=1, options={"transport": {"send_buffer": 4096}})
    rows = {what: (which, why) for what, which, why in describe(planned(config, TWO))}
    assert rows["device"] == ("cuda:0, cuda:1", "auto: 2 CUDA devices, sm 90")
    assert rows["transport"][1].endswith("with send_buffer=4096")


def test_no_bar_is_drawn_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    banner = Banner("http://here:1")
    banner.composition([("model", "small", "why " * 50)])
    banner.progress(Progress(1, 2))
    banner.ready(EngineLimits(10_000, 16, 4, 131_072, 10, (0,)), 1.25)
    banner.close()
    shown = capsys.readouterr()
    assert shown.out == ""
    lines = shown.err.splitlines()
    assert len(lines) == 3
    assert lines[2] == "ready at http://here:1 in 1.2 s (KV pool 160,000 tokens, context 131,072)"
