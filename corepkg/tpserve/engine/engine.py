"""The engine: applies a step's writes, runs the decoder, draws tokens into the token pool."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tpserve.api import Attention, Comm, Ops
from tpserve.engine.decode import DecodeSteps, Record
from tpserve.engine.inputs import Draws, make_inputs
from tpserve.engine.state import DeviceState
from tpserve.models.decoder import Decoder, LayerCache
from tpserve.step import EngineLimits, Pending, Step

__all__ = ["Launched", "ModelEngine"]


class Launched:
    """A step that has been given to the device.

    Args:
        drawn: its tokens, int64 ``[n]``.
        comm: what other ranks take part in it by; None for one rank.
    """

    def __init__(self, drawn: torch.Tensor, comm: Comm | None) -> None:
        self._drawn = drawn
        self._comm = comm
        self._copied: torch.cuda.Event | None = None
        if drawn.is_cuda:
            self._drawn = drawn.to("cpu", non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def tokens(self) -> list[int]:
        """Wait for the step; the token drawn for each sequence with ``sample``, in batch order.

        Raises:
            TransportError: another rank failed.
        """
        if self._copied is not None:
            if self._comm is None:
                self._copied.synchronize()
            else:
                self._comm.wait(self._copied)
        tokens: list[int] = self._drawn.tolist()
        return tokens


class ModelEngine:
    """A :class:`tpserve.step.Engine` over a :class:`~tpserve.models.decoder.Decoder`.

    Args:
        limits: agreed over all ranks.
        decoder: this rank's share of the model.
        attention: the backend that the decoder runs.
        ops: draws the tokens.
        caches: the KV pool, by layer, with a page more than ``limits`` says.
        comm: closed with the engine; None for one rank.
        device: where all tensors are.
    """

    def __init__(
        self,
        limits: EngineLimits,
        decoder: Decoder,
        attention: Attention,
        ops: Ops,
        caches: list[LayerCache],
        comm: Comm | None,
        device: str,
    ) -> None:
        self._limits = limits
        self._decoder = decoder
        self._attention = attention
        self._ops = ops
        self._caches = caches
        self._comm = comm
        self._state = DeviceState(limits, device)
        self._decode: DecodeSteps | None = None

    @property
    def limits(self) -> EngineLimits:
        """What this engine has."""
        return self._limits

    @torch.inference_mode()
    def record(self, sizes: Sequence[int], record: Record) -> None:
        """Record decode steps of these batch sizes, rising; later steps that fit into one are replayed.

        Raises:
            TransportError: another rank failed.
        """
        self._decode = DecodeSteps(self._decoder, self._attention, self._ops, self._state, self._caches, sizes, record)

    @torch.inference_mode()
    def launch(self, step: Step) -> Pending:
        """Start a step; on the CPU it is finished on return.

        Raises:
            TransportError: another rank failed.
        """
        self._state.apply(step)
        if self._decode is not None:
            if self._decode.takes(step):
                return Launched(self._decode.launch(step), self._comm)
            self._decode.forget()
        inputs = make_inputs(step, self._state, self._limits.page_size)
        self._attention.plan(inputs.attention)
        rows = inputs.draws.rows if inputs.draws else None
        hidden = self._decoder.forward(inputs.tokens, inputs.positions, inputs.cache_slots, self._caches, rows)
        if inputs.draws is None:
            return Launched(torch.empty(0, dtype=torch.int64), self._comm)
        return Launched(self._draw(hidden, inputs.draws), self._comm)

    def close(self) -> None:
        """Leave the tensor group and let go of the pool. May be called twice."""
        self._decode = None  # a comm is closed when no graph holds it any more
        if self._comm is not None:
            self._comm.close()
        self._caches.clear()

    def _draw(self, hidden: torch.Tensor, draws: Draws) -> torch.Tensor:
        tokens = self._ops.sample(self._decoder.logits(hidden), draws.sampling)
        self._state.tokens[draws.slots, draws.ends] = tokens.int()
        return tokens
