"""A comm that breaks the contract in the way that FAULT names, for test_comm_contract.py."""

from __future__ import annotations

import os
import time

import pytest
import torch
from msgspec.structs import replace

from tpserve.api import Closed, CommContext, CommSpec, DeadlineExceeded, Options
from tpserve.comm.gloo import GlooComm
from tpserve.testing.comm import CommContract


class Sound(GlooComm):
    """Keeps it."""


class Uneven(GlooComm):
    """Sums differ in the last bits from rank to rank."""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return super().all_reduce(tensor) * (1 + self.context.rank * 1e-6)


class Coarse(GlooComm):
    """Loses the lower bits of integers."""

    def min(self, value: int) -> int:
        return int(float(super().min(value)))


class Backwards(GlooComm):
    """Gathers in reverse order."""

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat(super().all_gather(tensor).chunk(self.context.size, dim=1)[::-1], dim=1)


class Inferring(GlooComm):
    """Infers how many columns it has gathered, which it cannot from none."""

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return super().all_gather(tensor).reshape(len(tensor), -1)


class Copying(GlooComm):
    """Broadcasts into a copy."""

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        return super().broadcast(tensor.clone(), source)


class Patient(GlooComm):
    """Waits longer than its timeout, and then goes on without the peer."""

    def min(self, value: int) -> int:
        try:
            return super().min(value)
        except DeadlineExceeded:
            time.sleep(0.1)
            return value


class Steadfast(GlooComm):
    """Takes the one timeout for the other."""

    def __init__(self, options: Options, context: CommContext) -> None:
        super().__init__(options, replace(context, join_timeout=context.timeout))


class Open(GlooComm):
    """Answers after it was closed."""

    def min(self, value: int) -> int:
        try:
            return super().min(value)
        except Closed:
            return value


class TestFaulty(CommContract):
    @pytest.fixture
    def spec(self) -> CommSpec:
        return CommSpec(name="faulty", summary="-", factory=f"{__name__}:{os.environ['FAULT']}")
