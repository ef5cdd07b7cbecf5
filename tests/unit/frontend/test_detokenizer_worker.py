from __future__ import annotations

import math
from threading import Thread

from tpserve.envelope import Opener, Sealer
from tpserve.frontend.detokenizer_worker import Detokenizer, run_detokenizer
from tpserve.frontend.text import TextCodec
from tpserve.messages import PoolReport, Shutdown, Started, StepOutput, TextOutput, decode_api, encode
from tpserve.testing.fake_server import make_pipe

EOS = 2
REPORT = PoolReport(1, 20, 16, 3, 0.5)


def test_requests_do_not_mix(codec: TextCodec) -> None:
    detokenizer = Detokenizer(codec)
    face, umlaut = codec.encode("😀"), codec.encode("ü")
    texts = []
    for index in range(4):
        uids, tokens = [7], [face[index]]
        if index < 2:
            uids, tokens = [7, 8], [face[index], umlaut[index]]
        texts += detokenizer.convert(StepOutput(index, uids, tokens, [None] * len(uids))).texts
    assert texts == ["", "", "", "ü", "", "😀"]


def test_the_end_of_text_token_is_no_text_and_what_was_held_back_comes_out(codec: TextCodec) -> None:
    detokenizer = Detokenizer(codec)
    half = codec.encode("😀")[0]
    (letter,) = codec.encode("x")
    detokenizer.convert(StepOutput(1, [1, 2, 3], [half, half, half], [None] * 3))
    ended = detokenizer.convert(StepOutput(2, [1, 2, 3], [letter, letter, -1], ["stop", "length", "abort"]))
    assert ended.texts == ["�", "�x", "�"]


def test_a_request_that_is_resumed_goes_on_within_its_character(codec: TextCodec) -> None:
    tokens = codec.encode("a😀ü")
    for known in range(len(tokens)):
        detokenizer = Detokenizer(codec)
        before = [detokenizer.convert(StepOutput(1, [7], [token], [None])).texts[0] for token in tokens[:known]]
        detokenizer = Detokenizer(codec)
        output = StepOutput(1, [7], [tokens[known]], [None], [Started(7, 10, 0, tokens[:known])])
        after = [detokenizer.convert(output).texts[0]]
        after += [detokenizer.convert(StepOutput(2, [7], [token], [None])).texts[0] for token in tokens[known + 1 :]]
        assert "".join(before + after) == "a😀ü"
        assert "�" not in "".join(before)


def test_forgets_requests_that_are_over(codec: TextCodec) -> None:
    detokenizer = Detokenizer(codec)
    detokenizer.convert(StepOutput(1, [1, 2, 3], [5, 5, 5], [None] * 3))
    assert len(detokenizer) == 3
    detokenizer.convert(StepOutput(2, [1, 2, 4], [EOS, -1, -1], ["stop", "abort", "abort"]))
    assert len(detokenizer) == 1


def test_passes_everything_else_on_and_the_shutdown_last(codec: TextCodec) -> None:
    (inbox, receiver), (to_api, api) = make_pipe(), make_pipe()
    sealer = Sealer(1000)
    (letter,) = codec.encode("x")
    output = StepOutput(1, [7, 8], [letter, EOS], [None, "stop"], [Started(7, 10, 4)], REPORT)
    for message in (output, Shutdown()):
        inbox.send(sealer.seal(encode(message)), math.inf)
    worker = Thread(target=run_detokenizer, args=(receiver, to_api, codec, 2000), daemon=True)
    worker.start()
    worker.join(30)
    assert not worker.is_alive()
    opener = Opener()
    passed_on = [decode_api(opener.open(frame)) for frame in api.recv_many(10, 1 << 20, 0)]
    expected = TextOutput([7, 8], [letter, EOS], ["x", ""], [None, "stop"], [Started(7, 10, 4)], REPORT)
    assert passed_on == [expected, Shutdown()]
