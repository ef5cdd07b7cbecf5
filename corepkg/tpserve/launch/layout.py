"""Where one generation of a server's processes meet: the addresses and names of all their links."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec

from tpserve.launch.rundir import making, remove_segments

__all__ = ["Layout"]


class Layout(msgspec.Struct, frozen=True):
    """The meeting points of one generation. Each generation has its own, so nothing of a dead one is met again.

    Attributes:
        run_dir: the server's run directory.
        generation: how often the processes have been started, from 1.
    """

    run_dir: Path
    generation: int = 1

    @property
    def directory(self) -> Path:
        """Holds the generation's sockets and rendezvous files."""
        return self.run_dir / f"g{self.generation}"

    @property
    def to_api(self) -> str:
        """Address of the pipe from tokenizers and detokenizers to the api process."""
        return self._address("api")

    @property
    def to_rank0(self) -> str:
        """Address of the pipe from the tokenizers to rank 0."""
        return self._address("rank0")

    @property
    def fanout(self) -> str:
        """Address of the fan-out from rank 0 to the other ranks."""
        return self._address("fanout")

    def create(self) -> None:
        """Make :attr:`directory`.

        Raises:
            LaunchError: the file system refuses.
        """
        with making(self.directory):
            self.directory.mkdir(mode=0o700)

    def remove(self) -> None:
        """Remove whatever the generation's processes left."""
        shutil.rmtree(self.directory, ignore_errors=True)
        remove_segments(self.name(""))

    def to_tokenizer(self, index: int) -> str:
        """Address of the pipe from the api process to a tokenizer."""
        return self._address(f"tokenizer{index}")

    def to_detokenizer(self, index: int) -> str:
        """Address of the pipe from rank 0 to a detokenizer."""
        return self._address(f"detokenizer{index}")

    def name(self, part: str) -> str:
        """Prefix for the files and shared-memory segments of ``part`` (``sync``, ``comm``).

        Whatever begins with it gets swept with the run directory, ``/dev/shm`` included.
        """
        return f"tpserve-{self.run_dir.name}-g{self.generation}-{part}"

    def _address(self, name: str) -> str:
        return f"ipc://{self.directory / name}"
