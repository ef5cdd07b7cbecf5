from __future__ import annotations

from collections.abc import Iterator

import pytest

from tpserve.frontend.text import TextCodec
from tpserve.testing.fake_server import FakeServer
from tpserve.testing.models import make_tokenizer


@pytest.fixture(scope="session")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    return TextCodec.from_folder(make_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture
def server(codec: TextCodec) -> Iterator[FakeServer]:
    """A server that echoes prompts, ready."""
    with FakeServer(codec) as server:
        yield server.start()
