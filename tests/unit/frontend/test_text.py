from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tpserve.errors import ModelError, RequestError
from tpserve.frontend.text import TextCodec
from tpserve.testing.models import SPECIAL_TOKENS

USER = [{"role": "user", "content": "Hi"}]
EXPECTED = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    """The folder, to be changed."""
    return shutil.copytree(folder, tmp_path / "model")


def configure(folder: Path, **changes: Any) -> None:
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps(config))


def text_of(codec: TextCodec, tokens: list[int]) -> str:
    """Everything that the tokens stand for, special ones included."""
    return "".join(SPECIAL_TOKENS[token] if token < 3 else codec.decode([token]) for token in tokens)


@pytest.mark.parametrize("text", ["", "plain", "two  spaces\n", "größer 😀", "\x00\u2028"])
def test_texts_survive(codec: TextCodec, text: str) -> None:
    assert codec.decode(codec.encode(text)) == text


def test_a_conversation_has_its_special_tokens_as_single_tokens(codec: TextCodec) -> None:
    tokens = codec.encode_chat(USER)
    assert text_of(codec, tokens) == EXPECTED
    assert [token for token in tokens if token < 3] == [1, 2, 1]


def test_decoding_leaves_special_tokens_out(codec: TextCodec) -> None:
    assert codec.decode([1, *codec.encode("a"), 2, 0]) == "a"


def test_a_template_file_wins_over_the_configuration(copy: Path) -> None:
    (copy / "chat_template.jinja").write_text("{{ eos_token }}file")
    codec = TextCodec.from_folder(copy)
    assert text_of(codec, codec.encode_chat(USER)) == "<|im_end|>file"


def test_of_several_templates_the_default_one_is_taken(copy: Path) -> None:
    configure(copy, chat_template=[{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}])
    codec = TextCodec.from_folder(copy)
    assert codec.decode(codec.encode_chat(USER)) == "d"


def test_special_tokens_may_be_objects_and_lie_in_a_file_of_their_own(copy: Path) -> None:
    configure(copy, chat_template="{{ bos_token }}{{ unk_token }}", bos_token={"content": "<b>"}, add_bos_token=True)
    (copy / "special_tokens_map.json").write_text('{"unk_token": "<u>", "bos_token": "<other>"}')
    codec = TextCodec.from_folder(copy)
    assert codec.decode(codec.encode_chat(USER)) == "<b><u>"


def test_further_variables_reach_the_template_whatever_their_name(copy: Path) -> None:
    configure(copy, chat_template="{{ self_name }}{{ messages | length }}")
    codec = TextCodec.from_folder(copy)
    assert codec.decode(codec.encode_chat(USER, self_name="x", messages=[], self=1)) == "x1"


def test_a_conversation_gets_no_second_beginning(copy: Path) -> None:
    tokenizer = json.loads((copy / "tokenizer.json").read_text())
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}},
    }
    (copy / "tokenizer.json").write_text(json.dumps(tokenizer))
    codec = TextCodec.from_folder(copy)
    assert text_of(codec, codec.encode("a")) == "<|im_start|>a"
    assert text_of(codec, codec.encode_chat(USER)) == EXPECTED


def test_truncation_and_padding_of_the_file_do_not_apply(copy: Path) -> None:
    tokenizer = Tokenizer.from_file(str(copy / "tokenizer.json"))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(copy / "tokenizer.json"))
    assert len(TextCodec.from_folder(copy).encode("x" * 50)) == 50


def test_without_a_template_conversations_are_refused(copy: Path) -> None:
    configure(copy, chat_template=None)
    codec = TextCodec.from_folder(copy)
    assert codec.decode(codec.encode("a")) == "a"
    with pytest.raises(RequestError, match="no chat template"):
        codec.encode_chat(USER)


def test_a_folder_without_a_tokenizer_is_a_model_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no tokenizer\.json"):
        TextCodec.from_folder(tmp_path)


def test_without_a_tokenizer_every_byte_is_a_token(tmp_path: Path) -> None:
    codec = TextCodec.from_folder(tmp_path, or_bytes=True)
    tokens = codec.encode("naïve 🙂")
    assert len(tokens) == len("naïve 🙂".encode())
    assert codec.decode(tokens) == "naïve 🙂"
    stream = codec.stream()
    assert "".join([*map(stream.push, [*tokens, 40_000]), stream.flush()]) == "naïve 🙂"


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_broken_file_is_a_model_error_that_names_it(copy: Path, name: str) -> None:
    (copy / name).write_text('{"a": ')
    with pytest.raises(ModelError, match=name):
        TextCodec.from_folder(copy)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"chat_template": 3}, "'chat_template' must be a text, found 3"),
        ({"chat_template": [{"name": "default", "template": 3}]}, "'chat_template' must be a text, found 3"),
        ({"eos_token": []}, r"'eos_token' must be a text, found \[\]"),
        ({"eos_token": {"content": 1.5}}, "'eos_token' must be a text, found {"),
    ],
)
def test_an_entry_of_the_wrong_type_is_a_model_error_that_names_it(copy: Path, changes: Any, says: str) -> None:
    configure(copy, **changes)
    with pytest.raises(ModelError, match=says):
        TextCodec.from_folder(copy)


@pytest.mark.parametrize("templates", [[], ["x"], [{}], [{"name": []}], {}])
def test_templates_among_which_none_is_the_default_are_none(copy: Path, templates: Any) -> None:
    configure(copy, chat_template=templates, add_bos_token=True, image_token=5)
    with pytest.raises(RequestError, match="no chat template"):
        TextCodec.from_folder(copy).encode_chat(USER)


@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer_config.json"])
def test_a_file_that_is_no_text_is_a_model_error_that_names_it(copy: Path, name: str) -> None:
    (copy / name).write_bytes(b"\xff")
    with pytest.raises(ModelError, match=name):
        TextCodec.from_folder(copy)


def test_loads_neither_torch_nor_transformers(folder: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from tpserve.frontend.text import TextCodec;"
        f"TextCodec.from_folder(Path({str(folder)!r})).encode_chat([{{'role': 'user', 'content': 'x'}}]);"
        "print([name for name in ('torch', 'transformers', 'numpy') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout.strip() == "[]"
