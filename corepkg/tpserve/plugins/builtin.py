"""The parts that tpserve itself brings, offered through the same hooks as anyone else's."""

from __future__ import annotations

from tpserve.api import (
    AttentionCapabilities,
    AttentionSpec,
    CommCapabilities,
    CommSpec,
    OpsCapabilities,
    OpsSpec,
    PolicySpec,
    SyncCapabilities,
    SyncSpec,
    TransportCapabilities,
    TransportSpec,
    hookimpl,
)
from tpserve.comm.options import PeerCommOptions, ShmCommOptions
from tpserve.policies.options import BatchingOptions, LpmOptions, PriorityOptions
from tpserve.sync.options import ShmOptions
from tpserve.transports.options import GlooOptions

TPSERVE_API = 1


@hookimpl
def tpserve_transports() -> list[TransportSpec]:
    """Queues inside one process; gloo broadcasts between ranks."""
    return [
        TransportSpec(
            name="inproc",
            summary="queues inside one process, for offline use and tests",
            factory="tpserve.transports.inproc:InprocTransport",
            capabilities=TransportCapabilities(fanout=True, pipes=True, multi_process=False),
        ),
        TransportSpec(
            name="gloo",
            summary="the messages themselves broadcast over gloo: a fan-out, on one host",
            factory="tpserve.transports.gloo:GlooTransport",
            options=GlooOptions,
            capabilities=TransportCapabilities(fanout=True, pipes=False, multi_process=True, multi_node=False),
        ),
    ]


@hookimpl
def tpserve_syncs() -> list[SyncSpec]:
    """A gloo send to each follower, a frame on the fan-out, a word in shared memory."""
    return [
        SyncSpec(
            name="gloo",
            summary="a gloo send to each follower, on one host",
            factory="tpserve.sync.gloo:GlooSync",
            capabilities=SyncCapabilities(multi_node=False),
        ),
        SyncSpec(
            name="inband",
            summary="a frame on the fan-out, sent together with the round's, on one host",
            factory="tpserve.sync.inband:InbandSync",
            capabilities=SyncCapabilities(multi_node=False),
        ),
        SyncSpec(
            name="shm",
            summary="a word in shared memory that followers watch and sleep on, on one host",
            factory="tpserve.sync.shm:ShmSync",
            options=ShmOptions,
            probe="tpserve.distributed.futex:probe",
            capabilities=SyncCapabilities(multi_node=False),
        ),
    ]


@hookimpl
def tpserve_policies() -> list[PolicySpec]:
    """Whom to take next."""
    return [
        PolicySpec(
            name="fcfs",
            summary="first come, first served",
            factory="tpserve.policies.fcfs:FcfsPolicy",
            options=BatchingOptions,
        ),
        PolicySpec(
            name="lpm",
            summary="the longest cached prefix first",
            factory="tpserve.policies.lpm:LpmPolicy",
            options=LpmOptions,
        ),
        PolicySpec(
            name="priority",
            summary="the most urgent first, by the requests' priority",
            factory="tpserve.policies.priority:PriorityPolicy",
            options=PriorityOptions,
        ),
    ]


@hookimpl
def tpserve_attentions() -> list[AttentionSpec]:
    """Compiled kernels, and the reference in plain torch."""
    return [
        AttentionSpec(
            name="cpu",
            summary="decoding in a kernel compiled for this machine's processor",
            factory="tpserve.attention.cpu:CpuAttention",
            probe="tpserve.native.build:probe",
            capabilities=AttentionCapabilities(
                devices=("cpu",),
                dtypes=("float32", "bfloat16"),
                head_dims=tuple(range(16, 513, 16)),
                sliding_window=True,
                soft_cap=True,
            ),
        ),
        AttentionSpec(
            name="torch",
            summary="the reference, in torch operators, for any device",
            factory="tpserve.attention.reference:TorchAttention",
            capabilities=AttentionCapabilities(devices=("cpu", "cuda"), sliding_window=True, soft_cap=True),
        ),
    ]


@hookimpl
def tpserve_ops() -> list[OpsSpec]:
    """Compiled kernels, and the reference in plain torch."""
    return [
        OpsSpec(
            name="cpu",
            summary="products and layer steps in kernels compiled for this machine's processor",
            factory="tpserve.ops.cpu:CpuOps",
            probe="tpserve.native.build:probe",
            capabilities=OpsCapabilities(devices=("cpu",), dtypes=("float32", "bfloat16")),
        ),
        OpsSpec(
            name="torch",
            summary="the reference, in torch operators, for any device",
            factory="tpserve.ops.reference:TorchOps",
            capabilities=OpsCapabilities(devices=("cpu", "cuda"), cuda_graph=True),
        ),
    ]


@hookimpl
def tpserve_comms() -> list[CommSpec]:
    """Shared memory, GPUs that write into each other's, NCCL, and gloo over loopback or ethernet."""
    return [
        CommSpec(
            name="shm",
            summary="sums in shared memory, for CPU tensors on one host",
            factory="tpserve.comm.shm:ShmComm",
            options=ShmCommOptions,
            probe="tpserve.comm.probe:probe_shm",
            capabilities=CommCapabilities(devices=("cpu",)),
        ),
        CommSpec(
            name="peer",
            summary="small sums between GPUs linked by NVLink by a kernel of our own, NCCL for all else",
            factory="tpserve.comm.peer:PeerComm",
            options=PeerCommOptions,
            requires=("triton>=3.6",),
            probe="tpserve.comm.probe:probe_peer",
            capabilities=CommCapabilities(devices=("cuda",), shared_device=False, cuda_graph=True),
        ),
        CommSpec(
            name="nccl",
            summary="NCCL, for ranks of one host with a GPU each",
            factory="tpserve.comm.nccl:NcclComm",
            probe="tpserve.comm.probe:probe_nccl",
            capabilities=CommCapabilities(devices=("cuda",), shared_device=False, cuda_graph=True),
        ),
        CommSpec(
            name="gloo",
            summary="gloo, for CPU tensors and for ranks that share one GPU",
            factory="tpserve.comm.gloo:GlooComm",
            capabilities=CommCapabilities(devices=("cpu", "cuda"), shared_device=True, multi_node=True),
        ),
    ]
