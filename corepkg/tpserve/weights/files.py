"""The safetensors files of a model folder, seen as one collection of named tensors that can be read in part."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from tpserve.distributed.partition import Range
from tpserve.errors import ModelError
from tpserve.models.fields import Fields
from tpserve.values import brief
from tpserve.weights import DAMAGED

if TYPE_CHECKING:
    import torch

__all__ = ["TensorFiles", "lack_of", "weight_files"]

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_FLOATS = ("F64", "F32", "BF16", "F16")


def weight_files(folder: Path) -> list[Path]:
    """The weight files of a folder: those that its index lists, or else ``model.safetensors``.

    Raises:
        ModelError: there are none, or the index lists one that is not there or lies elsewhere, or is no index.
    """
    index = folder / _INDEX
    names = _listed(index) if index.exists() else [_SINGLE]
    hint = f"{_INDEX} lists it: the download is incomplete" if index.exists() else "Weights must be safetensors files"
    for name in names:
        lack = lack_of(folder, name)
        if lack:
            raise ModelError(lack, hint)
    return [folder / name for name in names]


def _listed(index: Path) -> list[str]:
    """The files of an index."""
    files = Fields.of(index).section("weight_map").values.values()
    if not files:
        raise ModelError(f"{index} lists no files", "Its 'weight_map' must say in which file each tensor is")
    for name in files:
        if not isinstance(name, str) or not name or Path(name).name != name:
            raise ModelError(f"{index} lists {brief(repr(name))}, which is not the name of a file in the same folder")
    return sorted(set(files))


def lack_of(folder: Path, name: str) -> str | None:
    """What is wrong with a file that a folder must have; None if it is there."""
    path = folder / name
    try:
        if path.is_file():
            return None
        return f"{path} is not a file" if path.exists() else f"{folder} has no {name}"
    except OSError as error:
        return f"{path} cannot be looked at: {error.strerror}"


class TensorFiles:
    """Reads slices of stored tensors; a context manager that holds the files open.

    Raises:
        ModelError: a file is missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        from safetensors import SafetensorError, safe_open

        self.folder = folder
        self._files = ExitStack()
        self._slices: dict[str, Any] = {}
        for path in weight_files(folder):
            try:
                file = self._files.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                self._files.close()
                raise ModelError(f"cannot read {path}: {brief(str(error), 300)}", DAMAGED) from error
            self._slices.update({name: file.get_slice(name) for name in file.keys()})  # noqa: SIM118

    def __enter__(self) -> TensorFiles:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._slices.clear()
        self._files.close()

    def names(self) -> list[str]:
        """All tensors, sorted."""
        return sorted(self._slices)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a stored tensor."""
        return tuple(self._slices[name].get_shape())

    def is_float(self, name: str) -> bool:
        """Whether the tensor holds plain floating-point numbers of 16 bits or more."""
        return self._slices[name].get_dtype() in _FLOATS

    def read(self, name: str, rows: Range, columns: Range | None) -> torch.Tensor:
        """Read a part, in the stored dtype: ``[rows]``, or ``[rows, columns]``."""
        stored = self._slices[name]
        if columns is None:
            return stored[rows.start : rows.stop]  # type: ignore[no-any-return]
        return stored[rows.start : rows.stop, columns.start : columns.stop]  # type: ignore[no-any-return]
