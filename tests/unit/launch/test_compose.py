from __future__ import annotations

from typing import Any

import pytest
from tests.unit.launch.sample import MODEL, NONE, TWO

from tpserve.config import ServeConfig
from tpserve.errors import (
    ConfigError,
    LaunchError,
    ModelError,
    UnavailablePlugin,
    UnknownPlugin,
    UnsupportedByPlugin,
    UserError,
)
from tpserve.launch.compose import Composition, load_part, resolve
from tpserve.launch.devices import Accelerators, choose_device
from tpserve.models.config import ModelConfig
from tpserve.native.build import probe
from tpserve.plugins.registry import Registry
from tpserve.policies.fcfs import FcfsPolicy

PICKY = """
from tpserve.api import (AttentionCapabilities, AttentionSpec, CommCapabilities, CommSpec, OpsCapabilities, OpsSpec,
    TransportCapabilities, TransportSpec, hookimpl)
TPSERVE_API = 1

@hookimpl
def tpserve_transports():
    return [
        TransportSpec(name="fan", summary="s", factory="m:C", capabilities=TransportCapabilities(pipes=False)),
        TransportSpec(
            name="pipe", summary="s", factory="m:C", capabilities=TransportCapabilities(pipes=True, fanout=False)
        ),
    ]

@hookimpl
def tpserve_attentions():
    return [AttentionSpec(name="picky", summary="s", factory="m:C", capabilities=AttentionCapabilities({}))]

@hookimpl
def tpserve_ops():
    return [OpsSpec(name="picky", summary="s", factory="m:C", capabilities=OpsCapabilities({}))]

@hookimpl
def tpserve_comms():
    return [CommSpec(name="picky", summary="s", factory="m:C", capabilities=CommCapabilities({}))]
"""


def composed(accelerators: Accelerators = NONE, *, model: ModelConfig = MODEL, **settings: Any) -> Composition:
    return resolve(ServeConfig(**settings), model, Registry.discover(), accelerators)


def changed(**fields: Any) -> ModelConfig:
    return ModelConfig(**{name: getattr(MODEL, name) for name in ModelConfig.__struct_fields__} | fields)


def add_picky(site: Any, **capabilities: str) -> None:
    filled = PICKY
    for kind in ("Attention", "Ops", "Comm"):
        filled = filled.replace(
            f"{kind}Capabilities({{}})", f"{kind}Capabilities({capabilities.get(kind.lower(), '')})"
        )
    names = ("transport.fan", "transport.pipe", "attention.picky", "ops.picky", "comm.picky")
    site.add("picky", dict.fromkeys(names, "picky_plugin"), {"picky_plugin.py": filled})


def test_one_rank_needs_pipes_and_kernels_only() -> None:
    found = composed()
    assert (found.transport, found.sync, found.comm) == (None, None, None)
    assert found.pipes is not None
    kernels = "torch" if probe() else "cpu"
    assert (found.pipes.name, found.policy.name, found.attention.name, found.ops.name) == (
        "zmq",
        "fcfs",
        kernels,
        kernels,
    )
    assert found.device.type == "cpu"
    assert found.device.reason == "auto: no NVIDIA driver"


def test_without_a_compiler_auto_takes_the_reference_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nowhere/c++")
    found = composed()
    for part in (found.attention, found.ops):
        assert part.name == "torch"
        assert part.reason.startswith(f"auto: {part.kind}.cpu is unavailable: /nowhere/c++ cannot be run")
    with pytest.raises(UnavailablePlugin, match=r"ops\.cpu is unavailable"):
        composed(ops="cpu")


def test_several_ranks_need_all() -> None:
    found = composed(tp=2)
    assert found.transport is not None
    assert found.sync is not None
    assert found.comm is not None
    assert (found.transport.name, found.sync.name, found.comm.name) == ("zmq", "shm", "shm")
    assert found.pipes == found.transport.__class__(
        "transport", "zmq", "as the transport", found.transport.provider, {}
    )
    assert [partition.q_heads.size for partition in found.partitions] == [6, 3]


def test_an_offline_engine_needs_no_pipes() -> None:
    config = ServeConfig(transport="inproc")
    assert resolve(config, MODEL, Registry.discover(), NONE, offline=True).pipes is None


def test_what_was_asked_for_is_taken_and_says_so() -> None:
    found = composed(tp=2, transport="nng", options={"transport": {"send_buffer": 4096}})
    assert found.transport is not None
    assert (found.transport.name, found.transport.reason) == ("nng", "asked for")
    assert found.transport.options == {"send_buffer": 4096}


def test_pipes_may_be_another_transport_whose_general_options_are_not_meant_for_it() -> None:
    options = {"transport": {"send_buffer": 4096}, "transport.nng": {"batch": 64}}
    found = composed(tp=2, transport="zmq", pipe_transport="nng", options=options)
    assert found.transport is not None
    assert found.pipes is not None
    assert found.transport.options == {"send_buffer": 4096}
    assert (found.pipes.name, found.pipes.options) == ("nng", {"batch": 64})


def test_a_fanout_of_gloo_gets_the_pipes_of_another() -> None:
    found = composed(tp=2, transport="gloo", sync="inband", options={"transport": {"send_buffer": 4096}})
    assert found.transport is not None
    assert found.sync is not None
    assert found.pipes is not None
    assert (found.transport.name, found.sync.name, found.pipes.name) == ("gloo", "inband", "zmq")
    assert (found.transport.options, found.pipes.options) == ({"send_buffer": 4096}, {})
    assert found.pipes.reason == "auto: the first of zmq, nng; transport.gloo has no pipes"


def test_shared_memory_that_does_not_work_here_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tpserve.plugins.availability.run_probe", lambda probe, limit: "not on this machine")
    found = composed(tp=2)
    assert found.sync is not None
    assert (found.sync.name, found.sync.reason) == ("inband", "auto: sync.shm is unavailable: not on this machine")


def test_a_transport_without_pipes_gets_those_of_another(site: Any) -> None:
    add_picky(site)
    found = composed(tp=2, transport="fan")
    assert found.pipes is not None
    assert (found.pipes.name, found.pipes.reason) == ("zmq", "auto: the first of zmq, nng; transport.fan has no pipes")
    assert composed(transport="fan").pipes == found.pipes


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"transport": "inproc"}, "transport.inproc works inside one process only"),
        ({"transport": "inproc", "tp": 2}, "transport.inproc works inside one process only"),
        ({"pipe_transport": "inproc"}, "transport.inproc works inside one process only"),
        ({"transport": "pipe", "tp": 2}, "transport.pipe has no fan-out"),
        ({"transport": "zmq", "tp": 2, "pipe_transport": "fan"}, "transport.fan has no pipes"),
        ({"transport": "fan", "tp": 2, "pipe_transport": "fan"}, "transport.fan has no pipes"),
    ],
)
def test_a_transport_that_cannot_is_refused(site: Any, settings: dict[str, Any], message: str) -> None:
    add_picky(site)
    with pytest.raises(UnsupportedByPlugin, match=message):
        composed(**settings)


@pytest.mark.parametrize(
    ("capabilities", "settings", "message"),
    [
        ("devices=('cuda',)", {}, "runs on cuda, not cpu"),
        ("dtypes=('bfloat16', 'float16')", {}, "computes in bfloat16, float16, not float32"),
        ("head_dims=(128,)", {}, "has head sizes 128, and the model's is 64"),
        ("page_sizes=(1, 32)", {}, "has page sizes 1, 32, not 16"),
        ("min_sm=75", {}, "needs compute capability 7.5, and the device has 0"),
        ("sliding_window=False", {"model": changed(sliding_window=8)}, "has no sliding window"),
    ],
)
def test_attention_that_cannot_is_refused(site: Any, capabilities: str, settings: dict[str, Any], message: str) -> None:
    add_picky(site, attention=capabilities)
    with pytest.raises(UnsupportedByPlugin, match=f"attention.picky {message}") as refused:
        composed(attn="picky", **settings)
    assert refused.value.hint == "--attn auto takes one that can"


def test_ops_and_comm_that_cannot_are_refused(site: Any) -> None:
    add_picky(site, ops="dtypes=('float16',)", comm="devices=('cuda',), shared_device=False")
    with pytest.raises(UnsupportedByPlugin, match=r"ops\.picky computes in float16, not float32"):
        composed(ops="picky")
    with pytest.raises(UnsupportedByPlugin, match=r"comm\.picky combines tensors of cuda, not cpu"):
        composed(tp=2, comm="picky")
    with pytest.raises(UnsupportedByPlugin, match="needs a device for each rank"):
        composed(TWO, tp=2, device_step=0, comm="picky")
    assert composed(TWO, tp=2, comm="picky").comm is not None


def test_auto_passes_what_is_unavailable_and_says_why() -> None:
    found = composed(TWO)
    assert found.attention.name == "torch"
    assert "flashinfer is unavailable" in found.attention.reason
    assert "triton is unavailable" in found.attention.reason


def test_prefill_and_decode_may_have_backends_of_their_own(site: Any) -> None:
    add_picky(site, attention="devices=('cuda',), cuda_graph=True")
    found = composed(TWO, attn="torch,picky")
    assert found.decode_attention is not None
    assert (found.attention.name, found.decode_attention.name) == ("torch", "picky")
    assert found.cuda_graph
    assert composed(TWO, attn="picky,torch").cuda_graph_reason == "a graph cannot hold attention.torch"
    found = composed(attn="auto,torch")
    assert found.decode_attention is not None
    assert found.attention.reason.startswith("auto: ")
    assert found.decode_attention.reason == "asked for"
    assert composed().decode_attention is None


@pytest.mark.parametrize(
    ("attention", "error", "message"),
    [
        ("torch,picky", UnsupportedByPlugin, "attn is 'torch,picky': attention.picky runs on cuda, not cpu"),
        ("picky,torch", UnsupportedByPlugin, "attn is 'picky,torch': attention.picky runs on cuda, not cpu"),
        ("torch,nonesuch", UnknownPlugin, "attn is 'torch,nonesuch': there is no attention plugin named 'nonesuch'"),
        ("torch,flashinfer", UnavailablePlugin, "attn is 'torch,flashinfer': attention.flashinfer is unavailable: "),
        ("torch,torch,torch", ConfigError, "attn is 'torch,torch,torch'"),
        ("torch,", ConfigError, "attn is 'torch,'"),
    ],
)
def test_a_pair_that_cannot_be_had_is_named_whole(
    site: Any, attention: str, error: type[UserError], message: str
) -> None:
    add_picky(site, attention="devices=('cuda',)")
    with pytest.raises(error) as refused:
        composed(attn=attention)
    assert refused.value.message.startswith(message)
    assert refused.value.hint


def test_ranks_that_share_a_device_combine_by_gloo_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tpserve.plugins.availability.run_probe", lambda probe, limit: None)
    apart, together = (composed(TWO, tp=2, device_step=step).comm for step in (1, 0))
    assert apart is not None
    assert together is not None
    assert (apart.name, apart.reason) == ("peer", "auto: the first of peer, nccl, gloo")
    assert (together.name, together.reason) == (
        "gloo",
        "auto: comm.peer needs a device for each rank, and device_step is 0; "
        "comm.nccl needs a device for each rank, and device_step is 0",
    )
    with pytest.raises(UnsupportedByPlugin, match="needs a device for each rank"):
        composed(TWO, tp=2, device_step=0, comm="nccl")


def test_without_cuda_there_is_no_nccl() -> None:
    with pytest.raises(UnavailablePlugin, match=r"comm\.nccl is unavailable: there is no CUDA device"):
        composed(tp=2, comm="nccl")


def test_nothing_that_auto_knows_can_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = Registry([entry for entry in Registry.discover().entries() if entry.name not in ("zmq", "nng")])
    with pytest.raises(UnavailablePlugin, match="no transport can be used"):
        resolve(ServeConfig(), MODEL, registry, NONE)


def test_wrong_names_options_and_sizes() -> None:
    with pytest.raises(UnknownPlugin):
        composed(sync="nonesuch")
    with pytest.raises(UnavailablePlugin):
        composed(attn="flashinfer")
    with pytest.raises(ConfigError, match="no option 'nonesuch'"):
        composed(options={"transport": {"nonesuch": 1}})
    with pytest.raises(ModelError, match="cannot be split over 2"):
        composed(tp=2, model=changed(kv_heads=1, q_heads=1))


@pytest.mark.parametrize(
    ("settings", "model", "accelerators", "expected"),
    [
        ({}, MODEL, NONE, "float32"),
        ({}, changed(dtype="bfloat16"), NONE, "bfloat16"),
        ({}, changed(dtype="float16"), NONE, "float32"),
        ({}, MODEL, TWO, "bfloat16"),
        ({"dtype": "float16"}, MODEL, TWO, "float16"),
    ],
)
def test_dtype(settings: dict[str, Any], model: ModelConfig, accelerators: Accelerators, expected: str) -> None:
    assert composed(accelerators, model=model, **settings).dtype == expected


@pytest.mark.parametrize(
    ("capabilities", "settings", "accelerators", "expected"),
    [
        ({}, {}, NONE, (False, "not on CUDA")),
        ({}, {"cuda_graph": False}, TWO, (False, "asked for")),
        ({}, {}, TWO, (False, "a graph cannot hold attention.picky, ops.picky")),
        ({"attention": "cuda_graph=True"}, {}, TWO, (False, "a graph cannot hold ops.picky")),
        ({"attention": "cuda_graph=True"}, {"ops": "torch"}, TWO, (True, "all kernels can be recorded")),
        (
            {"attention": "cuda_graph=True", "ops": "cuda_graph=True"},
            {"tp": 2, "comm": "picky"},
            TWO,
            (False, "a graph cannot hold comm.picky"),
        ),
        (dict.fromkeys(("attention", "ops", "comm"), "cuda_graph=True"), {"tp": 2, "comm": "picky"}, TWO, (True, None)),
    ],
)
def test_graphs_hold_what_all_parts_allow(
    capabilities: dict[str, str],
    settings: dict[str, Any],
    accelerators: Accelerators,
    expected: tuple[bool, str | None],
    site: Any,
) -> None:
    add_picky(site, **capabilities)
    found = composed(accelerators, **{"attn": "picky", "ops": "picky", **settings})
    assert found.cuda_graph == expected[0]
    assert expected[1] in (None, found.cuda_graph_reason)


def test_device() -> None:
    assert choose_device("auto", 2, TWO).type == "cuda"
    assert choose_device("cpu", 1, TWO).type == "cpu"
    with pytest.raises(LaunchError, match="no CUDA device can be used: no NVIDIA driver"):
        choose_device("cuda", 1, NONE)
    with pytest.raises(LaunchError, match="need 3 CUDA devices and there are 2"):
        choose_device("auto", 3, TWO)


def test_a_part_is_loaded_with_its_options_bound() -> None:
    assert isinstance(load_part(composed().policy)(), FcfsPolicy)


@pytest.mark.parametrize(
    ("layers", "settings", "accelerators", "tokens", "reason"),
    [
        (30, {}, NONE, 512, "auto: about a second on the CPU"),
        (2, {}, NONE, 1024, "auto: about a second on the CPU"),
        (3000, {}, NONE, 128, "auto: about a second on the CPU"),
        (300_000, {}, NONE, 128, "auto: about a second on the CPU"),
        (30, {"max_step_tokens": 8192}, NONE, 8192, "asked for"),
        (30, {}, TWO, 16384, "auto: on CUDA"),
    ],
)
def test_a_step_on_the_cpu_is_short_enough_to_wait_for(
    layers: int, settings: dict[str, Any], accelerators: Accelerators, tokens: int, reason: str
) -> None:
    found = composed(accelerators, model=changed(layers=layers), **settings)
    assert (found.step_tokens, found.step_reason) == (tokens, reason)


@pytest.mark.parametrize(
    ("settings", "accelerators", "overlap"),
    [({}, NONE, False), ({}, TWO, True), ({"overlap": True}, NONE, True), ({"overlap": False}, TWO, False)],
)
def test_rounds_overlap_with_what_computes_by_itself(
    settings: dict[str, Any], accelerators: Accelerators, overlap: bool
) -> None:
    assert composed(accelerators, **settings).overlap == overlap
