"""Where a text is split before the merges of a byte-level vocabulary apply.

A GGUF file only names the way (``tokenizer.ggml.pre``), and transformers takes GPT-2's for a name that it does not
know. So the ways of the models that are served are here, as their own tokenizer.json has them; any other is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["SPLITS", "Split", "set_split"]


class Split(msgspec.Struct, frozen=True):
    """One way.

    Attributes:
        pattern: what stays together, as Oniguruma reads it; empty: GPT-2's.
        digits: each digit is by itself, before the pattern applies.
        nfc: characters are composed first.
        whole_first: a piece that is a token is that token, whatever its merges are.
        bos: a text begins with the special token of that name, unless the file says otherwise.
    """

    pattern: str = ""
    digits: bool = False
    nfc: bool = False
    whole_first: bool = False
    bos: bool = False


def _words(numbers: str) -> str:
    """The pattern of Llama 3 and Qwen2, which differ in how many digits stay together."""
    return (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + numbers
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_LLAMA3 = Split(_words(r"\p{N}{1,3}"), whole_first=True, bos=True)
_QWEN2 = Split(_words(r"\p{N}"), nfc=True)
_TEKKEN = Split(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    whole_first=True,
    bos=True,
)

SPLITS = {
    "gpt-2": Split(),
    "smollm": Split(digits=True),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
    "tekken": _TEKKEN,
}
"""By name."""


def set_split(tokenizer: Tokenizer, split: Split) -> None:
    """Let a byte-level BPE tokenizer split texts so."""
    from tokenizers import Regex, normalizers, pre_tokenizers

    steps: list[pre_tokenizers.PreTokenizer] = []
    if split.digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if split.pattern:
        steps.append(pre_tokenizers.Split(Regex(split.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not split.pattern))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if split.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.model.ignore_merges = split.whole_first
