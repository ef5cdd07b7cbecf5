"""A trace of steady decoding, for ``--profile``."""

from __future__ import annotations

import logging
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.profiler import ProfilerActivity, profile

from tpserve.errors import ConfigError
from tpserve.step import Engine, EngineLimits, Pending, Step

__all__ = ["ProfiledEngine", "check_folder"]

WAIT = 16
STEPS = 32

logger = logging.getLogger(__name__)


def check_folder(folder: Path) -> None:
    """Make the folder for traces, and see that files can be written there.

    Raises:
        ConfigError: it cannot be made, or nothing can be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"no traces can be written in {folder}: {error.strerror}", "Choose another folder") from None


class ProfiledEngine:
    """An engine that writes a trace in Chrome's format of some of its steps.

    When steps that only decode have followed each other for a while, the next 32 are traced; again only with a larger
    batch than before, whose trace takes the place of the other. To write it stops this rank for seconds. What cannot
    be written ends the tracing, with a warning in the log, and nothing else.

    Args:
        engine: computes the steps.
        path: where the trace goes, in a folder that has been checked.
    """

    def __init__(self, engine: Engine, path: Path) -> None:
        self._engine = engine
        self._path = path
        self._largest = 0
        self._row = 0
        self._is_over = False
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
            if self._row >= WAIT and size > self._largest and not self._is_over:
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
            self._write(self._profile)
        else:
            self._largest = 0
        self._profile = None

    def _write(self, steps: profile) -> None:
        """Write a trace, whole or not at all."""
        try:
            with TemporaryDirectory(dir=self._path.parent) as folder:
                partial = Path(folder) / self._path.name
                steps.export_chrome_trace(str(partial))
                # Torch tells its own log alone that it could not write a file, or not to its end.
                if not partial.exists() or not partial.read_bytes().rstrip().endswith(b"}"):
                    raise OSError("it is cut off; is the disk full?")
                partial.replace(self._path)
        except (OSError, RuntimeError) as error:
            self._is_over = True
            logger.warning("the trace %s cannot be written, and this rank traces no more: %s", self._path, error)
        else:
            logger.info("%d steps of a batch of %d traced in %s", STEPS, self._largest, self._path)
