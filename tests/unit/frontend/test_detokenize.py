from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from tpserve.frontend.detokenize import MAX_HELD, StreamDecoder
from tpserve.frontend.text import TextCodec
from tpserve.testing.models import VOCAB_SIZE

CORPUS = ["the quick brown fox jumps over the lazy dog", "größer Ärger, naïve café", "a b  c   d", "日本語 テキスト 😀"]


def sentencepiece_like() -> Tokenizer:
    """A BPE as Llama 2's: words begin with ▁, unknown characters become byte tokens, one leading space is dropped."""
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trained = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(special_tokens=["<unk>", "<s>", "</s>", *byte_tokens], vocab_size=360)
    trained.train_from_iterator(CORPUS[:3], trainer)
    trained.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    fresh = Tokenizer.from_str(trained.to_str().replace('"special":true', '"special":false'))
    fresh.add_special_tokens([AddedToken(token, special=True) for token in ("<unk>", "<s>", "</s>")])
    return fresh


def metaspace() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.train_from_iterator(
        CORPUS, trainers.UnigramTrainer(vocab_size=80, unk_token="<unk>", special_tokens=["<unk>"])
    )
    return tokenizer


def word_pieces() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=120, special_tokens=["[UNK]"])
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


WINDOWED = {"sentencepiece": sentencepiece_like(), "metaspace": metaspace(), "wordpiece": word_pieces()}


def pieces(stream: StreamDecoder, tokens: Iterable[int]) -> list[str]:
    return [*(stream.push(token) for token in tokens), stream.flush()]


@given(tokens=st.lists(st.integers(0, VOCAB_SIZE + 5), max_size=40))
@example(tokens=[2, 300, 5, 1])
def test_byte_level_is_exact_for_any_tokens(codec: TextCodec, tokens: list[int]) -> None:
    assert "".join(pieces(codec.stream(), tokens)) == codec.decode(tokens)


@given(text=st.text(max_size=40))
def test_byte_level_never_gives_half_a_character(codec: TextCodec, text: str) -> None:
    found = pieces(codec.stream(), codec.encode(text))
    assert "".join(found) == text
    assert "�" in text or not any("�" in piece for piece in found)


def test_an_incomplete_character_at_the_end_is_replaced(codec: TextCodec) -> None:
    tokens = codec.encode("a😀")[:-1]
    assert pieces(codec.stream(), tokens)[-1] == "�"


@pytest.mark.parametrize("name", WINDOWED)
@given(text=st.text(st.sampled_from("the quick brown fäöü éß 日本語テキスト😀👩 .,!-abc"), max_size=40))
def test_windows_add_up_to_the_whole_text(name: str, text: str) -> None:
    codec = TextCodec(WINDOWED[name])
    tokens = codec.encode(text)
    assert "".join(pieces(codec.stream(), tokens)) == codec.decode(tokens)


@given(text=st.text(st.sampled_from("the fox 日本語😀👩é"), max_size=20))
def test_windows_never_give_half_a_character(text: str) -> None:
    codec = TextCodec(WINDOWED["sentencepiece"])
    assert not any("�" in piece for piece in pieces(codec.stream(), codec.encode(text)))


def test_windows_keep_a_space_behind_a_special_token() -> None:
    codec = TextCodec(WINDOWED["sentencepiece"])
    first, second = codec.encode("the"), codec.encode("fox")
    assert "".join(pieces(codec.stream(), [*first, 1, *second])) == "the fox"


def test_windows_hold_back_a_bounded_number_of_broken_tokens() -> None:
    tokenizer = WINDOWED["sentencepiece"]
    broken = tokenizer.token_to_id("<0xFF>")
    stream = TextCodec(tokenizer).stream()
    found = [stream.push(broken) for _ in range(20 * MAX_HELD)]
    assert sum(piece.count("�") for piece in found) > 18 * MAX_HELD


def test_windows_skip_special_and_unknown_tokens() -> None:
    codec = TextCodec(WINDOWED["sentencepiece"])
    assert pieces(codec.stream(), [1, 99_999, 2]) == ["", "", "", ""]
