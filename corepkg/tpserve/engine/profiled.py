"""A trace of steady decoding, for ``--profile``."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from tpserve.step import Engine, EngineLimits, Pending, Step

__all__ = ["ProfiledEngine"]

WAIT = 16
STEPS = 32

logger = logging.getLogger(__name__)


class ProfiledEngine:
    """An engine that writes a trace in Chrome's format of some of its steps.

    When steps that only decode have followed each other for a while, the next 32 are traced; again only with a larger
    batch than before, whose trace takes the place of the other. To write it stops this rank for seconds.

    Args:
        engine: computes the steps.
        path: where the trace goes; folders are made.
    """

    def __init__(self, engine: Engine, path: Path) -> None:
        self._engine = engine
        self._path = path
        self._largest = 0
        self._row = 0
        self._profile: profile | None = None

    @property
    def limits(self) -> EngineLimits:
        """What the engine has."""
        return self._engine.limits

    def launch(self, step: Step) -> Pending:
        """Start a step."""
        pending = self._engine.launch(step)
        size = len(step.sequences)
        self._row = self._row + 1 if all(each.end - each.start == 1 for each in step.sequences) else 0
        if self._profile is None:
            if self._row >= WAIT and size > self._largest:
                self._start(size)
        elif self._row == 0 or self._row == STEPS:
            self._stop(whole=self._row == STEPS)
        return pending

    def close(self) -> None:
        """Close the engine; an unfinished trace is dropped."""
        if self._profile is not None:
            self._stop(whole=False)
        self._engine.close()

    def _start(self, size: int) -> None:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities, acc_events=True)
        self._profile.start()
        self._largest, self._row = size, 0

    def _stop(self, *, whole: bool) -> None:
        assert self._profile is not None
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._profile.stop()
        if whole:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._profile.export_chrome_trace(str(self._path))
            logger.info("%d steps of a batch of %d traced in %s", STEPS, self._largest, self._path)
        else:
            self._largest = 0
        self._profile = None
