from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tpserve.frontend.text import TextCodec
from tpserve.testing.fake_server import FakeServer
from tpserve.testing.models import make_tokenizer


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder with a tokenizer, and without a model."""
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def codec(folder: Path) -> TextCodec:
    return TextCodec.from_folder(folder)


@pytest.fixture
def server(codec: TextCodec) -> Iterator[FakeServer]:
    """A server that echoes prompts, ready."""
    with FakeServer(codec) as server:
        yield server.start()


@pytest.fixture
def client(server: FakeServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60.0) as client:
        yield client
