"""Models from the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tpserve.errors import ModelError

__all__ = ["download"]

_WANTED = ["*.json", "*.safetensors", "*.jinja"]
_UNWANTED = ["*/*"]


def download(model: str, notify: Callable[[str], None]) -> Path:
    """The folder of a hub model: what is in the hub's cache already, completed by download.

    Raises:
        ModelError: the hub cannot be reached and the model is not in the cache, or the hub does not give it.
    """
    from huggingface_hub import errors, snapshot_download

    notify(f"fetching {model} from the Hugging Face hub")
    try:
        return Path(snapshot_download(model, allow_patterns=_WANTED, ignore_patterns=_UNWANTED))
    except errors.GatedRepoError as error:
        raise ModelError(
            f"{model} is not open to everyone", "Accept its terms on huggingface.co, set HF_TOKEN"
        ) from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise ModelError(
            f"{model} is neither a path here nor a model on the Hugging Face hub", "A private one needs HF_TOKEN"
        ) from error
    except (errors.LocalEntryNotFoundError, ConnectionError) as error:
        raise ModelError(
            f"{model} is not on this machine, and the Hugging Face hub cannot be reached",
            "Go online once, or name a folder or a .gguf file",
        ) from error
    except Exception as error:  # the hub's client lets through errors of whichever HTTP library it uses
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(f"{model} could not be downloaded: {reason}") from error
