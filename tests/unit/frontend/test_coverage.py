"""How few tokens a text can have."""

from __future__ import annotations

import random

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from tpserve.frontend.coverage import Coverage

TEXT = "Ein Vögelein   sang\n\n\n----------\t42 mal: ~~~~ トラ e\u0301e\u0301 <|end|>  "


def trained(**parts: object) -> Tokenizer:
    """A small byte-level tokenizer that has learnt the text, with some parts replaced."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    tokenizer.train_from_iterator([TEXT] * 3, trainers.BpeTrainer(vocab_size=400, special_tokens=["<|end|>"]))
    return tokenizer


def texts() -> list[str]:
    draw = random.Random(7)
    return ["", " " * 500, "-" * 500, TEXT * 9, *("".join(draw.choices(TEXT, k=300)) for _ in range(30))]


@pytest.mark.parametrize(
    "parts",
    [
        {},
        {"normalizer": normalizers.NFC()},
        {"normalizer": normalizers.Sequence([normalizers.Strip(), normalizers.Lowercase()])},
        {
            "pre_tokenizer": pre_tokenizers.Sequence(
                [pre_tokenizers.Split(Regex(" +"), "isolated"), pre_tokenizers.ByteLevel(use_regex=False)]
            )
        },
        {"pre_tokenizer": pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.ByteLevel()])},
    ],
    ids=["plain", "nfc", "strip", "split", "drops blanks"],
)
def test_no_text_has_fewer(parts: dict[str, object]) -> None:
    tokenizer = trained(**parts)
    coverage = Coverage(tokenizer)
    for text in texts():
        assert coverage.least_tokens(text) <= len(tokenizer.encode(text).ids), text


def test_bytes_without_a_token_do_not_count() -> None:
    tokenizer = trained()
    assert Coverage(tokenizer).least_tokens("\x07" * 100) == 0 == len(tokenizer.encode("\x07" * 100).ids)


def test_an_added_token_that_takes_in_blanks_leaves_nothing_known() -> None:
    tokenizer = trained()
    assert Coverage(tokenizer).least_tokens("Vö" * 100) > 0
    tokenizer.add_tokens([AddedToken("<mask>", lstrip=True)])
    assert Coverage(tokenizer).least_tokens("Vö" * 100) == 0


def test_long_tokens_of_blanks_do_not_hide_the_length_of_words() -> None:
    tokenizer = trained()
    tokenizer.add_tokens([" " * 100, "-" * 100])
    longest = max(len(token) for token in tokenizer.get_vocab(with_added_tokens=False))
    assert Coverage(tokenizer).least_tokens("sang " * 1000) >= 4000 / longest
