"""Reading the head of GGUF files."""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from tpserve.errors import ModelError
from tpserve.testing.models import make_model
from tpserve.weights.gguf import HEAD_SIZES, read_header
from tpserve.weights.splits import SPLITS

MakeGguf = Callable[..., Path]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("original"), "qwen2", num_hidden_layers=1)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def number(value: int) -> bytes:
    return struct.pack("<I", value)


def head(architecture: str = "llama", *keys: tuple[str, int, bytes], tensors: tuple[str, ...] = ()) -> bytes:
    """A whole head; keys are (name, type, packed value), and one without a value is left out."""
    own = [
        ("context_length", 4, number(64)),
        ("attention.head_count", 4, number(4)),
        ("attention.head_count_kv", 4, number(4)),
        ("attention.layer_norm_rms_epsilon", 6, struct.pack("<f", 1e-5)),
    ]
    default = [(f"{architecture}.{name}", kind, value) for name, kind, value in own]
    default.append(("general.architecture", 8, text(architecture)))
    default += [(f"tokenizer.ggml.{name}", 9, struct.pack("<IQ", 8, 1) + text("x")) for name in ("tokens", "merges")]
    pairs = list({pair[0]: pair for pair in [*default, *keys]}.values())
    pairs = [pair for pair in pairs if pair[2]]
    begin = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(pairs))
    metadata = b"".join(text(name) + struct.pack("<I", kind) + value for name, kind, value in pairs)
    infos = b"".join(text(name) + struct.pack("<IQIQ", 1, 4, 0, 0) for name in tensors)
    return begin + metadata + infos


ONE, FOUR = struct.pack("<f", 1), struct.pack("<f", 4)


def refusal(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    with pytest.raises(ModelError) as caught:
        read_header(path)
    return str(caught.value)


def test_a_file_that_the_gguf_package_wrote(original: Path, make_gguf: MakeGguf) -> None:
    from gguf import GGUFReader

    path = make_gguf(original, "F16", {"some.list": [1, 2, 3], "some.flag": True})
    header = read_header(path)

    assert header.architecture == "qwen2"
    assert header.metadata["general.name"] == "tiny"
    assert header.key("attention.head_count") == 8
    assert header.key("rope.freq_base") == 10000.0
    assert header.metadata["some.flag"] is True
    assert "some.list" not in header.metadata
    assert header.arrays["some.list"] == 3
    assert header.matrix_types == {0, 1}  # 176 columns are stored as float32 by the fixture
    assert {"token_embd.weight", "blk.0.attn_q.bias", "output_norm.weight"} <= header.tensors.keys()
    assert header.tensors["blk.0.ffn_gate.weight"] == (176, 128)
    begin = {tensor.name: tensor.data_offset for tensor in GGUFReader(path).tensors}
    assert {name: place for name, (_, place) in header.places.items()} == begin
    assert header.data == min(begin.values())


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "ends too soon"),
        (b"PK\x03\x04" + bytes(100), "starts with b'PK"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (head()[:-3], "ends too soon"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1 << 60), "a text of"),
        (head("llama", ("llama.x", 9, 5000 * struct.pack("<IQ", 9, 1) + struct.pack("<IQ", 0, 0))), "nested too deep"),
        (
            head("llama", ("llama.x", 9, struct.pack("<IQ", 12, (1 << 64) - 1))),
            "an array of 18446744073709551615 values",
        ),
        (head("llama", tensors=("a", "a")), "it has the tensor a twice"),
        (head("llama", ("general.alignment", 4, bytes(4))), "its general.alignment is 0"),
        (head("llama", ("general.alignment", 8, text("x"))), "its general.alignment is 'x'"),
        (head("llama", ("general.alignment", 8, text("x" * 10_000))), "its general.alignment is 'xxxxx"),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + text("a") + struct.pack("<I5Q", 5, 1, 1, 1, 1, 1),
            "it has the tensor a of 5 dimensions",
        ),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + 2 * (text("a") + struct.pack("<IIQ", 9, 0, 0)),
            "it has the key a twice",
        ),
        (head("llama", ("llama.x", 99, b"?")), "not a readable GGUF file: it has a value of the unknown type 99"),
        (head("gemma3"), "'gemma3', which is not supported. Supported in GGUF files: llama, qwen2, qwen3"),
        (head("llama", ("llama.expert_count", 4, struct.pack("<I", 8))), "mixture of experts"),
        (
            head("llama", ("llama.rope.scaling.type", 8, text("yarn")), ("llama.rope.scaling.factor", 6, FOUR)),
            "says llama.rope.scaling.type = 'yarn'; llama.rope.scaling.factor = 4.0: its conversion would lose that",
        ),
        (head("llama", ("llama.rope.scaling.factor", 6, FOUR)), "says llama.rope.scaling.factor = 4.0: "),
        (head("llama", ("llama.rope.scale_linear", 6, FOUR)), "says llama.rope.scale_linear = 4.0: "),
        (head("qwen2", ("qwen2.attn_logit_softcapping", 6, FOUR)), "says qwen2.attn_logit_softcapping = 4.0: "),
        (head("llama", ("llama.logit_scale", 6, FOUR)), "says llama.logit_scale = 4.0: "),
        (head("llama", ("llama.attention.causal", 7, bytes(1))), "says llama.attention.causal = False: "),
        (head("llama", ("llama.tensor_data_layout", 8, text("x"))), "says llama.tensor_data_layout = 'x': "),
        (head("llama", ("llama.of.tomorrow", 7, b"\x01")), "says llama.of.tomorrow = True: its conversion would lose"),
        (
            head("llama", ("llama.attention.sliding_window_pattern", 9, struct.pack("<IQ", 7, 2) + bytes(2))),
            "says llama.attention.sliding_window_pattern, 2 values: its conversion",
        ),
        (head("llama", ("llama.attention.head_count", 4, b"")), "lacks llama.attention.head_count in its metadata"),
        (head("llama", ("llama.attention.head_count", 4, bytes(4))), "head_count must be a positive integer, found 0"),
        (head("llama", ("llama.attention.head_count_kv", 5, b"\xff" * 4)), "must be a positive integer, found -1"),
        (head("llama", ("llama.embedding_length", 8, text("x"))), "must be a positive integer, found 'x'"),
        (head("llama", ("llama.attention.sliding_window", 8, text("x"))), "must be an integer from 0, found 'x'"),
        (head("llama", ("llama.rope.freq_base", 6, bytes(4))), "must be a positive number, found 0.0"),
        (head("llama", ("llama.rope.freq_base", 6, struct.pack("<f", math.inf))), "a positive number, found inf"),
        (head("llama", ("llama.rope.freq_base", 7, b"\x01")), "must be a positive number, found True"),
        *(
            (
                head("llama", (f"tokenizer.ggml.{name}_token_id", 4, number(1))),
                f"its tokenizer.ggml.{name}_token_id must be one of 1 tokens, found 1. The file is damaged",
            )
            for name in ("bos", "eos", "unknown", "padding")
        ),
        (head("llama", ("tokenizer.ggml.tokens", 9, b"")), "lacks tokenizer.ggml.tokens in its metadata"),
        (head("llama", ("tokenizer.ggml.merges", 9, b"")), "lacks tokenizer.ggml.merges in its metadata"),
        (head("llama", tensors=("rope_freqs.weight",)), "scaled rotary positions"),
        (
            head("llama", ("tokenizer.ggml.model", 8, text("gpt2"))),
            "says nothing of tokenizer.ggml.pre: where its tokenizer splits a text is not known. Use the model's",
        ),
        *(
            (
                head("llama", ("tokenizer.ggml.model", 8, text("gpt2")), ("tokenizer.ggml.pre", 8, text(name))),
                f"says tokenizer.ggml.pre = '{name}': where its tokenizer splits a text is not known. Use the",
            )
            for name in ("default", "of-tomorrow")
        ),
        (head("llama", ("llama.attention.head_count_kv", 4, b"")), "lacks llama.attention.head_count_kv in its"),
        (head("llama", ("llama.x\nerror: \x1b[31m", 4, number(1))), r"says llama.x\nerror: \x1b[31m = 1: its"),
        (head("llama", ("llama.x", 8, text("y" * 200_000))), f"says llama.x = '{'y' * 78}…: its conversion"),
        (
            head("llama", *((f"llama.x{index}", 4, number(1)) for index in range(3000))),
            "says llama.x0 = 1; llama.x1 = 1; llama.x2 = 1; llama.x3 = 1 and 2996 more: its conversion",
        ),
        (head("llama", tensors=2 * ("a\n" + "b" * 99,)), rf"it has the tensor a\n{'b' * 76}… twice"),
        (head("llama", ("llama.context_length", 4, b"")), "lacks llama.context_length in its metadata"),
        (
            head("llama", ("llama.attention.layer_norm_rms_epsilon", 6, b"")),
            "lacks llama.attention.layer_norm_rms_epsilon in its metadata",
        ),
        (head("llama", tensors=("blk.0.a",)), "has tensors of 1 layers, and 0 by its llama.block_count"),
        (
            head("llama", ("llama.block_count", 4, struct.pack("<I", 1 << 31)), tensors=("blk.0.a", "blk.0.b")),
            "has tensors of 1 layers, and 2147483648 by its llama.block_count",
        ),
        (
            head("llama", ("llama.block_count", 4, struct.pack("<I", 1)), tensors=("blk.0.a", "blk.1.a")),
            "has tensors of 2 layers, and 1 by its llama.block_count",
        ),
    ],
    ids=itertools.count(),
)
def test_what_cannot_be_converted_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    error = refusal(tmp_path / "x.gguf", content)

    assert str(tmp_path / "x.gguf") in error
    assert words in error
    assert len(error) < 600
    assert error.isprintable()


@pytest.mark.parametrize(
    "keys",
    [
        [],
        [("llama.expert_count", 4, struct.pack("<I", 0))],
        [(f"llama.{name}", 4, number(16)) for name in HEAD_SIZES],
        [("llama.rope.scaling.type", 8, text("none")), ("llama.rope.scaling.factor", 6, bytes(4))],
        [("llama.rope.scale_linear", 6, ONE), ("llama.final_logit_softcapping", 6, bytes(4))],
        [("llama.attention.causal", 7, b"\x01"), ("llama.use_parallel_residual", 7, bytes(1))],
        [
            ("llama.tensor_data_layout", 8, text("Meta AI original pth")),
            ("llama.attention.sliding_window", 4, bytes(4)),
        ],
        [("llama.rope.scaling.original_context_length", 4, number(32)), ("llama.pooling_type", 4, number(3))],
        *([("tokenizer.ggml.model", 8, text("gpt2")), ("tokenizer.ggml.pre", 8, text(name))] for name in SPLITS),
        [("tokenizer.ggml.model", 8, text("llama")), ("tokenizer.ggml.pre", 8, text("default"))],
        [("tokenizer.ggml.merges", 9, b""), ("tokenizer.ggml.scores", 9, struct.pack("<IQ", 6, 1) + ONE)],
        [("a.b", 9, struct.pack("<IQ", 5, 2) + bytes(8)), ("a.c", 9, struct.pack("<IQ", 8, 1) + text("x"))],
    ],
    ids=itertools.count(),
)
def test_a_plain_head_is_accepted(tmp_path: Path, keys: list[tuple[str, int, bytes]]) -> None:
    (tmp_path / "x.gguf").write_bytes(head("llama", *keys, tensors=("output_norm.weight",)))

    assert read_header(tmp_path / "x.gguf").tensors == {"output_norm.weight": (4,)}


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="No such file"):
        read_header(tmp_path / "none.gguf")
