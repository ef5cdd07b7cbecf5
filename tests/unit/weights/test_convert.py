"""Conversion of a small GGUF file: what comes out, and that it comes out whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors import SafetensorError
from safetensors.torch import load_file
from tests.unit.weights.conftest import gguf_name

from tpserve.errors import ModelError
from tpserve.frontend.text import TextCodec
from tpserve.models.config import ModelConfig
from tpserve.testing.models import CHAT_TEMPLATE, make_model
from tpserve.weights import DAMAGED, convert
from tpserve.weights.convert import stored_dtype
from tpserve.weights.gguf import BFLOAT16, FLOAT16, WINDOW, GgufHeader, read_header
from tpserve.weights.layout import Shapes, stored_shapes

MakeGguf = Callable[..., Path]
FILES = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]


@contextmanager
def converter(source: Path, folder: Path, *flags: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tpserve.weights.convert", *flags, str(source), str(folder)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as child:
        try:
            yield child
        finally:
            child.kill()


def head(metadata: dict[str, Any], tensors: Shapes, types: Iterable[int] = ()) -> GgufHeader:
    """A head of which nobody asks where the tensors are."""
    return GgufHeader(metadata, dict(tensors), set(types), {}, 0, 32, {})


def finish(child: subprocess.Popen[str]) -> str:
    output, errors = child.communicate(timeout=240)
    assert child.returncode == 0, errors
    return output


def wait_until_it_writes(folder: Path) -> None:
    deadline = time.monotonic() + 120
    while not folder.with_name(f"{folder.name}.partial").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("original")
    return make_model(folder, "qwen2", num_hidden_layers=1, intermediate_size=192, rms_norm_eps=1e-5)


@pytest.mark.parametrize(
    ("matrices", "dtype", "error"),
    [("F32", "float32", 0.0), ("F16", "float16", 2e-3), ("BF16", "bfloat16", 2e-2), ("Q8_0", "float32", 2e-2)],
)
def test_a_file_becomes_a_folder(
    original: Path,
    make_gguf: MakeGguf,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    matrices: str,
    dtype: str,
    error: float,
) -> None:
    from tokenizers import Tokenizer

    folder = tmp_path / "made"
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(sys, "argv", ["convert", str(make_gguf(original, matrices)), str(folder)])
    convert.main()

    assert sorted(path.name for path in folder.iterdir()) == sorted([*FILES, "chat_template.jinja"])
    assert (folder / "chat_template.jinja").read_text() == CHAT_TEMPLATE
    text = "The héllo <|im_end|>"
    assert (
        Tokenizer.from_file(str(folder / "tokenizer.json")).decode(
            Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids, skip_special_tokens=False
        )
        == text
    )
    before, after = ModelConfig.from_folder(original), ModelConfig.from_folder(folder)
    assert after.dtype == dtype
    assert (after.hidden, after.q_heads, after.kv_heads, after.head_dim) == (128, 8, 2, 16)
    assert (after.rope, after.eos_ids, after.max_context) == (before.rope, before.eos_ids, before.max_context)
    assert after.rms_eps == pytest.approx(1e-5)
    compare(load_file(original / "model.safetensors"), load_file(folder / "model.safetensors"), dtype, error)


def compare(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor], dtype: str, error: float) -> None:
    assert set(before) == set(after)
    for name, tensor in after.items():
        assert tensor.dtype == getattr(torch, dtype)
        torch.testing.assert_close(tensor.float(), before[name], rtol=error, atol=error)


@pytest.mark.parametrize(
    ("types", "dtype"),
    [
        ({BFLOAT16}, "bfloat16"),
        ({FLOAT16}, "float16"),
        ({0}, "float32"),
        ({0, FLOAT16}, "float32"),
        ({3, 8}, "float32"),
    ],
)
def test_weights_keep_the_dtype_that_all_matrices_have(types: set[int], dtype: str) -> None:
    assert stored_dtype(head({}, {}, types)) == dtype


def test_two_at_once_make_one(original: Path, make_gguf: MakeGguf, tmp_path: Path) -> None:
    source, folder = make_gguf(original), tmp_path / "made"

    with converter(source, folder) as first, converter(source, folder) as second:
        said = finish(first) + finish(second)

    assert said.count("storing the weights") == 1
    assert all((folder / name).exists() for name in FILES)
    assert not (tmp_path / "made.partial").exists()


def test_one_that_was_killed_half_way_is_made_anew(original: Path, make_gguf: MakeGguf, tmp_path: Path) -> None:
    source, folder = make_gguf(original), tmp_path / "made"
    with converter(source, folder) as child:
        wait_until_it_writes(folder)
        child.send_signal(signal.SIGKILL)
        child.wait(timeout=60)
    assert not folder.exists()
    (tmp_path / "made.partial" / "half").write_text("left by the first")

    with converter(source, folder) as child:
        finish(child)

    assert sorted(path.name for path in folder.iterdir()) == sorted([*FILES, "chat_template.jinja"])
    assert not (tmp_path / "made.partial").exists()


def test_an_attached_one_leaves_with_its_parent(original: Path, make_gguf: MakeGguf, tmp_path: Path) -> None:
    source, folder = make_gguf(original), tmp_path / "made"

    with converter(source, folder, "--attached") as child:
        wait_until_it_writes(folder)
        assert child.stdin is not None
        child.stdin.close()
        assert child.wait(timeout=60) == 1
        assert child.stderr is not None
        assert child.stderr.read() == ""

    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]


def test_an_attached_one_that_only_waits_leaves_the_others_work_alone(
    original: Path, make_gguf: MakeGguf, tmp_path: Path
) -> None:
    source, folder = make_gguf(original), tmp_path / "made"
    with converter(source, folder) as first:
        wait_until_it_writes(folder)
        first.send_signal(signal.SIGSTOP)
        with converter(source, folder, "--attached") as second:
            assert second.stdout is not None
            assert "waiting for it" in second.stdout.readline()
            assert second.stdin is not None
            second.stdin.close()
            assert second.wait(timeout=60) == 1
        assert {"made.partial", "made.lock"} <= {path.name for path in tmp_path.iterdir()}
        first.send_signal(signal.SIGCONT)
        finish(first)


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left_when_who_asked_is_stopped(
    stop: signal.Signals, original: Path, make_gguf: MakeGguf, cache: Path
) -> None:
    command = [sys.executable, "-m", "tpserve.cli.main", "model", "path", str(make_gguf(original))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        deadline = time.monotonic() + 120
        while not list(cache.glob("models/*.partial")):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        child.send_signal(stop)
        child.communicate(timeout=60)
        while list(cache.glob("models/*")):
            assert time.monotonic() < deadline + 60
            time.sleep(0.01)


def test_a_background_job_is_deaf_to_an_interruption(original: Path, make_gguf: MakeGguf, tmp_path: Path) -> None:
    folder, before = tmp_path / "made", signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with converter(make_gguf(original), folder, "--attached") as child:
            wait_until_it_writes(folder)
            child.send_signal(signal.SIGINT)
            assert child.wait(timeout=240) == 0
    finally:
        signal.signal(signal.SIGINT, before)
    assert folder.is_dir()


@pytest.mark.parametrize(
    ("extra", "steps", "begins"),
    [
        ({"tokenizer.ggml.pre": "smollm"}, ["Digits", "ByteLevel"], []),
        ({"tokenizer.ggml.pre": "llama-bpe"}, ["Split", "ByteLevel"], [1]),
        ({"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.add_bos_token": False}, ["Split", "ByteLevel"], []),
    ],
)
def test_texts_are_split_and_begin_as_the_file_says(
    extra: dict[str, Any], steps: list[str], begins: list[int], original: Path, make_gguf: MakeGguf, tmp_path: Path
) -> None:
    """Or, if it does not say how they begin, as such models' do."""
    with converter(make_gguf(original, extra=extra), tmp_path / "made") as child:
        finish(child)
    made = json.loads((tmp_path / "made" / "tokenizer.json").read_bytes())["pre_tokenizer"]["pretokenizers"]
    assert [step["type"] for step in made] == steps
    assert TextCodec.from_folder(tmp_path / "made").encode("e")[:-1] == begins


def test_what_is_not_gguf_is_one_line(tmp_path: Path) -> None:
    source = tmp_path / "bad.gguf"
    source.write_bytes(b"not a model")

    with converter(source, tmp_path / "made") as child:
        _, errors = child.communicate(timeout=120)

    assert child.returncode == 2
    assert errors.startswith(f"error: {source} is not a readable GGUF file")
    assert len(errors.splitlines()) == 1


def test_a_file_that_ends_too_soon_is_one_line(original: Path, make_gguf: MakeGguf, tmp_path: Path) -> None:
    source = make_gguf(original, "F32")
    os.truncate(source, source.stat().st_size // 2)
    with converter(source, tmp_path / "made") as child:
        _, errors = child.communicate(timeout=240)
    assert child.returncode == 2, errors
    assert re.fullmatch(rf"error: \S+ ends at byte \d+, and the file at \d+\. {DAMAGED}\n", errors)


def test_a_tensor_in_anothers_place_is_one_line(original: Path, make_gguf: MakeGguf, tmp_path: Path) -> None:
    source = make_gguf(original)
    content = source.read_bytes()
    name = b"blk.0.attn_norm.weight"
    at = content.index(name) + len(name) + 4 + 8 + 4  # after the number of dimensions, one dimension, and the type
    assert content[at : at + 8] != bytes(8)
    source.write_bytes(content[:at] + bytes(8) + content[at + 8 :])
    with converter(source, tmp_path / "made") as child:
        output, errors = child.communicate(timeout=240)
    assert (child.returncode, output) == (2, "")
    assert re.fullmatch(
        rf"error: blk\.0\S+ begins at byte \d+, and \S+ ends at \d+\. {DAMAGED}\n",
        errors,
    )


def test_tensors_lie_one_behind_the_other(original: Path, make_gguf: MakeGguf) -> None:
    import gguf

    def check(header: GgufHeader, missing: int = 0) -> None:
        convert._check_places(header, source.stat().st_size - missing, gguf)

    for matrices in ("F32", "F16", "Q8_0", "Q4_0", "Q5_1"):
        for alignment in (32, 256):
            source = make_gguf(original, matrices, {"general.alignment": alignment})
            header = read_header(source)
            assert header.alignment == alignment
            check(header)
    kinds = {kind.name: kind.value for kind in gguf.GGMLQuantizationType}
    names = sorted(header.places, key=lambda name: header.places[name][1])
    first, second, last = names[0], names[1], names[-1]

    def moved(name: str, by: int = 0, kind: str = "") -> GgufHeader:
        was, begin = header.places[name]
        return replace(header, places=header.places | {name: (kinds.get(kind, was), begin + by)})

    for wrong, says in [
        (
            moved(first, by=-256),
            f"{first} begins at byte {header.data - 256}, and the head ends at {header.data}\\. {DAMAGED}$",
        ),
        (moved(second, by=-256), f"{second} begins at byte .* and {first} ends at"),
        (moved(second, by=256), f"{second} begins at byte .* and {first} ends at"),
        (moved(second, by=8), f"{second} begins at byte .* and {first} ends at"),
        (moved(first, kind="F16"), f"{second} begins at byte .* and {first} ends at"),
        (moved(last, by=1 << 40), f"{last} begins at byte .* and {names[-2]} ends at"),
        (
            replace(header, places=header.places | {first: (999, header.data)}),
            f"{first} is of the unknown type 999\\. {DAMAGED}$",
        ),
    ]:
        with pytest.raises(ModelError, match=f"^{says}"):
            check(wrong)
    with pytest.raises(ModelError, match=f"{last} ends at byte .*, and the file at "):
        check(header, missing=1)


@pytest.mark.parametrize(
    ("extra", "renamed", "says"),
    [
        ({}, {"blk.0.attn_k.weight": None}, "the file lacks blk.0.attn_k.weight. By its metadata it is a Qwen2For"),
        ({}, {"blk.0.attn_k.weight": "blk.0.attn_x.weight"}, "the file lacks blk.0.attn_k.weight."),
        ({}, {"output_norm.weight": None}, "the file lacks output_norm.weight."),
        ({}, {"blk.0.attn_q.bias": "blk.1.attn_q.bias", "blk.0.attn_k.bias": None}, "has tensors of 2 layers"),
        ({"qwen2.block_count": 2}, {}, "has tensors of 1 layers, and 2 by"),
        ({"qwen2.attention.head_count": 4}, {}, "the file: blk.0.attn_k.weight has shape [32, 128], and its metadata"),
        ({"qwen2.attention.head_count": 3}, {}, "by its metadata, 3 query heads are not a multiple of 2 KV heads"),
        (
            {"qwen2.attention.key_length": 24},
            {},
            "the file's qwen2.attention.key_length is 24, and its conversion would",
        ),
        ({"qwen2.rope.dimension_count": 8}, {}, "the file's qwen2.rope.dimension_count is 8, and its conversion would"),
        (
            {"qwen2.attention.sliding_window": 16},
            {},
            "the file's qwen2.attention.sliding_window is 16, and its conversion would make no window. Use the model's",
        ),
        (
            {"tokenizer.ggml.model": "bogus"},
            {},
            "its tokenizer cannot be read: ValueError: ",
        ),
        ({"qwen2.embedding_length": 96}, {}, "the file: token_embd.weight has shape [320, 128], and its metadata"),
    ],
)
def test_tensors_that_are_not_the_models_are_named_and_nothing_is_left(
    original: Path, make_gguf: MakeGguf, tmp_path: Path, extra: dict[str, int], renamed: dict[str, str], says: str
) -> None:
    source, folder = make_gguf(original, extra=extra, renamed=renamed), tmp_path / "cache" / "made"
    with converter(source, folder) as child:
        _, errors = child.communicate(timeout=240)
    assert child.returncode == 2, errors
    assert errors.startswith("error: ")
    assert says in errors
    assert errors.count("\n") == 1
    assert not folder.parent.exists() or not list(folder.parent.iterdir())


def test_a_tensor_that_nobody_knows_is_refused(original: Path) -> None:
    import gguf

    config = ModelConfig.from_folder(original)
    whole = {gguf_name(name): shape for name, shape in stored_shapes(config).items()}

    def check(**more: tuple[int, ...]) -> None:
        header = head({"general.architecture": "qwen2"}, {**whole, **more})
        convert._check_tensors(header, config, gguf)

    check(**{"blk.0.attn_rot_embd.weight": (8,)})
    with pytest.raises(ModelError, match=r"^the file has blk\.0\.attn_q\.scale\. By its metadata .* has no such$"):
        check(**{"blk.0.attn_q.scale": (1,)})


@pytest.mark.parametrize(
    ("said", "made", "says"),
    [
        ({"attention.head_dim": 24}, {}, "attention.head_dim is 24, and its conversion would make heads of 16"),
        ({"rope.dimension_count": 8}, {}, "rope.dimension_count is 8, and its conversion would make heads of 16"),
        ({WINDOW: 16}, {}, f"{WINDOW} is 16, and its conversion would make no window"),
        ({WINDOW: 16}, {"sliding_window": 32}, f"{WINDOW} is 16, and its conversion would make 32"),
        ({}, {"sliding_window": 32}, f"{WINDOW} is absent, and its conversion would make 32"),
        ({WINDOW: 1 << 20}, {"sliding_window": 32}, f"{WINDOW} is {1 << 20}, and its conversion would make 32"),
        ({"attention.key_length": 16}, {}, None),
        ({WINDOW: 0}, {}, None),
        ({WINDOW: 1 << 20}, {}, None),
        ({WINDOW: 32}, {"sliding_window": 32}, None),
    ],
)
def test_a_conversion_makes_what_the_metadata_says(
    original: Path, said: dict[str, int], made: dict[str, int], says: str | None
) -> None:
    metadata = {"general.architecture": "llama"} | {f"llama.{key}": value for key, value in said.items()}
    config = replace(ModelConfig.from_folder(original), **made)
    with pytest.raises(ModelError, match=f"^the file's llama.{says}") if says else nullcontext():
        convert._check_config(head(metadata, {}), config)


def test_what_a_library_says_is_one_line_that_tells_of_what() -> None:
    with pytest.raises(ModelError) as caught, convert._reading("weights"):
        raise ZeroDivisionError("one line\nand another.")
    assert caught.value.message == "its weights cannot be read: ZeroDivisionError: one line and another"
    with pytest.raises(ModelError, match=r"^of our own$"), convert._reading("weights"):
        raise ModelError("of our own")


@pytest.mark.parametrize(("architecture", "name"), [("llama", "llama"), ("mistral", "llama"), ("qwen3", "qwen3")])
@pytest.mark.parametrize("tied", [True, False])
def test_the_tensors_of_each_architecture_are_known(architecture: str, name: str, tied: bool, tmp_path: Path) -> None:
    import gguf

    config = ModelConfig.from_folder(make_model(tmp_path / "m", architecture, tie_word_embeddings=tied))
    whole = {gguf_name(name): shape for name, shape in stored_shapes(config).items()}
    assert ("output.weight" in whole) is not tied
    convert._check_tensors(head({"general.architecture": name}, whole), config, gguf)


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_cache_without_room_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr(convert, "read_header", lambda source: None)
    monkeypatch.setattr(convert, "build_once", refuse)
    monkeypatch.setattr(sys, "argv", ["convert", "model.gguf", str(tmp_path / "models" / "made")])
    with pytest.raises(SystemExit) as ended:
        convert.main()
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said == f"error: no room in the cache {tmp_path / 'models'}; TPSERVE_CACHE says where it is\n"
