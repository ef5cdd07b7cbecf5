"""Where texts are split: as the models' own tokenizers do it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from tpserve.testing.models import make_tokenizer
from tpserve.weights.splits import SPLITS, set_split


def pieces(name: str, text: str) -> list[str]:
    tokenizer = Tokenizer(models.BPE())
    set_split(tokenizer, SPLITS[name])
    normalized = tokenizer.normalizer.normalize_str(text) if tokenizer.normalizer else text
    return [
        piece.replace("Ġ", " ").replace("Ċ", "\n") for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(normalized)
    ]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpt-2", ["don", "'t", "  ", " 1234", "\n  ", " DON", "'", "T", " x", ".", "\n"]),
        ("smollm", ["don", "'t", "   ", "1", "2", "3", "4", "\n  ", " DON", "'", "T", " x", ".", "\n"]),
        ("llama-bpe", ["don", "'t", "  ", " ", "123", "4", "\n", "  ", " DON", "'T", " x", ".\n"]),
        ("qwen2", ["don", "'t", "  ", " ", "1", "2", "3", "4", "\n", "  ", " DON", "'T", " x", ".\n"]),
        ("tekken", ["don", "'t", "  ", " ", "1", "2", "3", "4", "\n", "  ", " DON", "'T", " x", ".\n"]),
    ],
)
def test_a_text_is_split(name: str, expected: list[str]) -> None:
    assert pieces(name, "don't   1234\n   DON'T x.\n") == expected


@pytest.mark.parametrize("name", sorted(SPLITS.keys() - {"gpt-2", "smollm"}))
def test_patterns_are_those_that_transformers_knows(name: str) -> None:
    known = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping").GGUF_PRE_TOKENIZER_SPLITS
    assert SPLITS[name].pattern == known[name]


def test_characters_are_composed_for_qwen_alone() -> None:
    assert pieces("qwen2", "e\u0301") == pieces("gpt-2", "\u00e9") != pieces("gpt-2", "e\u0301")


def test_a_split_lasts(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(make_tokenizer(tmp_path) / "tokenizer.json"))
    set_split(tokenizer, SPLITS["llama-bpe"])
    read = Tokenizer.from_str(tokenizer.to_str())
    assert read.model.ignore_merges
    assert read.to_str() == tokenizer.to_str()
    set_split(read, SPLITS["gpt-2"])
    assert not read.model.ignore_merges
