"""The hub: what is asked of it, and one sentence for each way in which it can fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import errors

from tpserve.errors import ModelError
from tpserve.weights.hub import download


class Hub:
    """Stands in for ``snapshot_download``."""

    def __init__(self) -> None:
        self.failure: Exception | None = None
        self.asked: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, model: str, **arguments: Any) -> str:
        self.asked.append((model, arguments))
        if self.failure is not None:
            raise self.failure
        return "/cache/of/the/hub"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    hub = Hub()
    monkeypatch.setattr("huggingface_hub.snapshot_download", hub)
    return hub


def http(kind: type[errors.HfHubHTTPError]) -> errors.HfHubHTTPError:
    """An error of the hub, without the response that its constructor wants."""
    error = kind.__new__(kind)
    error.args = ("503 Server Error\nmore",)
    return error


def test_what_is_downloaded(hub: Hub) -> None:
    from fnmatch import fnmatch

    told: list[str] = []

    assert download("some/one", told.append) == Path("/cache/of/the/hub")

    assert told == ["fetching some/one from the Hugging Face hub"]
    ((model, arguments),) = hub.asked
    assert model == "some/one"
    files = ["config.json", "tokenizer.json", "model-1-of-2.safetensors", "chat_template.jinja", "model.bin", "x.pth"]
    files += ["pytorch_model.bin", "original/params.json", "onnx/model.onnx", "README.md", "code.py"]
    wanted = [file for file in files if any(fnmatch(file, pattern) for pattern in arguments["allow_patterns"])]
    kept = [file for file in wanted if not any(fnmatch(file, pattern) for pattern in arguments["ignore_patterns"])]
    assert kept == files[:4]


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        (
            errors.LocalEntryNotFoundError("offline"),
            "is not on this machine, and the Hugging Face hub cannot be reached",
        ),
        (errors.OfflineModeIsEnabled("offline"), "the Hugging Face hub cannot be reached"),
        (ConnectionResetError("gone"), "the Hugging Face hub cannot be reached"),
        (http(errors.RepositoryNotFoundError), "neither a path here nor a model on the Hugging Face hub"),
        (errors.HFValidationError("bad id"), "neither a path here nor a model on the Hugging Face hub"),
        (http(errors.GatedRepoError), "is not open to everyone"),
        (http(errors.HfHubHTTPError), "could not be downloaded: 503 Server Error"),
        (OSError(28, "No space left on device"), "could not be downloaded: [Errno 28] No space left on device"),
        (RuntimeError(), "could not be downloaded: RuntimeError"),
    ],
)
def test_each_failure_is_one_sentence(hub: Hub, failure: Exception, words: str) -> None:
    hub.failure = failure

    with pytest.raises(ModelError) as caught:
        download("some/one", lambda _: None)

    assert words in caught.value.message
    assert "some/one" in caught.value.message
    assert "\n" not in str(caught.value)


def test_offline_with_the_real_client(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))

    with pytest.raises(ModelError, match="cannot be reached"):
        download("tpserve-tests/no-such-model", lambda _: None)
