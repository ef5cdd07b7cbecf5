"""What a person may name as a model, and what they are told when it is none."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tpserve.config import ServeConfig
from tpserve.distributed.partition import Partition
from tpserve.errors import ModelError
from tpserve.frontend.text import TextCodec
from tpserve.launch.plan import Plan
from tpserve.models.config import ModelConfig
from tpserve.testing.models import make_model
from tpserve.weights import default_model, source
from tpserve.weights.loader import load_shard
from tpserve.weights.source import ModelFolder, resolve_model

MakeGguf = Callable[..., Path]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "my-model", "qwen2", num_hidden_layers=1)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The ids that were asked of the hub, which has none of them."""
    asked: list[str] = []

    def download(model: str, notify: Callable[[str], None]) -> Path:
        asked.append(model)
        return tmp_path / "my-model"

    monkeypatch.setattr(source, "download", download)
    return asked


def refusal(model: str) -> ModelError:
    with pytest.raises(ModelError) as caught:
        resolve_model(model)
    return caught.value


def test_a_folder(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_model(str(model)) == ModelFolder(model, "my-model")

    monkeypatch.chdir(model)
    assert resolve_model(".") == ModelFolder(model, "my-model")


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_an_incomplete_folder_names_what_it_lacks(model: Path, missing: str) -> None:
    (model / missing).unlink()

    assert refusal(str(model)).message == f"{model} has no {missing}"


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_folder_in_the_place_of_a_file(model: Path, name: str) -> None:
    (model / name).unlink()
    (model / name).mkdir()
    assert refusal(str(model)).message == f"{model / name} is not a file"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("/dev/null", "is neither a folder nor a file"),
        ("~nobody-of-that-name/model", "cannot be looked at: Could not determine home directory."),
        ("a" * 300, "cannot be looked at: File name too long"),
    ],
)
def test_a_name_that_can_be_no_model(hub: list[str], name: str, says: str) -> None:
    assert refusal(name).message == f"{name} {says}"
    assert hub == []


@pytest.mark.parametrize("name", ["/no/such", "./none", "../none", "~/none-such", "a/b/c", "none.gguf", "a b", "a/"])
def test_a_path_that_is_not_there_is_not_looked_for_on_the_hub(hub: list[str], name: str) -> None:
    error = refusal(name)

    assert error.message == f"{name} does not exist"
    assert hub == []


@pytest.mark.parametrize("load_format", ["auto", "safetensors", "dummy"])
def test_a_folder_is_no_gguf_file(model: Path, load_format: str) -> None:
    assert resolve_model(str(model), load_format).path == model
    with pytest.raises(ModelError, match=r"my-model is no \.gguf file"):
        resolve_model(str(model), "gguf")


def test_a_gguf_file_is_not_safetensors(model: Path, make_gguf: MakeGguf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "_run_converter", lambda *_: None)
    file = make_gguf(model)
    monkeypatch.setattr(default_model, "locate", lambda: file)
    assert resolve_model("", "gguf").path == resolve_model(str(file), "gguf").path
    for name in (str(file), ""):
        with pytest.raises(ModelError, match="is a GGUF file"):
            resolve_model(name, "safetensors")


def test_dummy_weights_need_only_a_config(model: Path) -> None:
    for name in ("tokenizer.json", "model.safetensors"):
        (model / name).unlink()
    assert resolve_model(str(model), "dummy").path == model
    (model / "config.json").unlink()
    with pytest.raises(ModelError, match=r"has no config\.json"):
        resolve_model(str(model), "dummy")


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_text("")

    assert refusal(str(tmp_path / "model.bin")).message.endswith("model.bin is not a .gguf file")


@pytest.mark.parametrize("name", ["Qwen/Qwen3-0.6B", "gpt2", "some_one/a.b"])
def test_other_names_are_hub_ids(model: Path, hub: list[str], name: str) -> None:
    assert resolve_model(name) == ModelFolder(model, name)
    assert hub == [name]


def test_an_incomplete_model_of_the_hub(model: Path, hub: list[str]) -> None:
    (model / "model.safetensors").unlink()

    assert "has no model.safetensors" in refusal("some/one").message


RESOLVE = """
import sys
from tpserve.weights.source import resolve_model

for _ in range(2):
    print(resolve_model(sys.argv[1], notify=print).name)
print(sorted({"torch", "transformers", "safetensors"} & set(sys.modules)))
"""


def test_a_gguf_file_is_converted_once_and_in_another_process(model: Path, make_gguf: MakeGguf, cache: Path) -> None:
    command = [sys.executable, "-c", RESOLVE, str(make_gguf(model))]

    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)

    (folder,) = (path for path in (cache / "models").iterdir() if path.is_dir())
    assert done.stdout.splitlines() == [
        f"converting tiny.gguf to safetensors in {folder} (once)",
        "storing the weights as float32; for a small model that takes half a minute",
        "tiny",
        "tiny",
        "[]",
    ]
    assert ModelConfig.from_folder(folder).hidden == 128
    assert resolve_model(str(folder)).path == folder


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_damaged_conversion_says_that_removing_it_makes_a_new_one(
    model: Path, cache: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def use(folder: Path) -> None:
        plan = Plan.make(ServeConfig(model=str(folder)), print)
        TextCodec.from_folder(folder)
        load_shard(folder, plan.model, Partition.of(plan.model, 1, 0), torch.float32)

    folder = cache / "models" / "tiny-0123-v1"
    shutil.copytree(model, folder)
    use(folder)
    for each in (folder, model):
        (each / name).write_bytes((each / name).read_bytes()[:-20])
        with pytest.raises(ModelError) as caught:
            use(each)
        assert str(each) in caught.value.message
        removing = f"Remove the folder {each}, and the model is converted again"
        assert caught.value.hint.startswith(removing) is (each == folder)
    monkeypatch.delenv("TPSERVE_CACHE")
    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(ModelError, match=str(model)):
        use(model)


def no_home() -> Path:
    raise RuntimeError("Could not determine home directory.")


def test_files_of_one_name_and_other_content_are_kept_apart(
    model: Path, make_gguf: MakeGguf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "_run_converter", lambda *_: None)

    one, two = (resolve_model(str(make_gguf(model, extra={"marker": marker}))).path for marker in (1, 2))

    assert one != two


def test_a_file_may_have_as_long_a_name_as_any(model: Path, make_gguf: MakeGguf) -> None:
    source = make_gguf(model)
    source = source.rename(source.with_name("ü" * 124 + ".gguf"))
    assert len(source.name.encode()) > 250
    assert resolve_model(str(source)).path.name.startswith("ü" * 40 + "-")


def test_a_conversion_that_fails_is_one_line(model: Path, make_gguf: MakeGguf, cache: Path) -> None:
    file = make_gguf(model)
    file.write_bytes(file.read_bytes()[:-1000])  # the head is whole

    error = refusal(str(file))

    assert error.message.startswith(f"{file} could not be converted: ")
    assert "\n" not in error.message
    assert not [path for path in (cache / "models").iterdir() if path.is_dir()]


def test_the_empty_name_is_the_embedded_model(
    model: Path, make_gguf: MakeGguf, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = make_gguf(model)
    monkeypatch.setattr(default_model, "locate", lambda: file)
    converted: list[Path] = []
    monkeypatch.setattr(source, "_run_converter", lambda source, *_: converted.append(source))

    assert resolve_model("").name == "SmolLM2-135M-Instruct"
    assert converted == [file]


def test_the_converter_is_not_looked_for_in_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tpserve.py").write_text("raise SystemExit('a stranger')")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=r"missing\.gguf"):
        source._run_converter(tmp_path / "missing.gguf", tmp_path / "folder", print)
