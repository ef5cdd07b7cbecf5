"""The detokenizer process: tokens become text, a round at a time."""

from __future__ import annotations

import math

from tpserve.api import PipeReceiver, PipeSender
from tpserve.envelope import Opener, Sealer
from tpserve.frontend.detokenize import StreamDecoder
from tpserve.frontend.text import TextCodec
from tpserve.messages import FinishReason, Started, StepOutput, TextOutput, decode_step, encode

__all__ = ["Detokenizer", "run_detokenizer"]

MAX_FRAMES = 64
MAX_BYTES = 16 << 20


def run_detokenizer(receiver: PipeReceiver, to_api: PipeSender, codec: TextCodec, producer: int) -> None:
    """Turn rank 0's replies into text until a Shutdown comes, which goes on to the api process.

    Args:
        receiver: where rank 0's replies come from.
        to_api: connected pipe to the api process.
        codec: the model's tokenizer.
        producer: this process's number in envelopes.

    Raises:
        TransportError: a link failed, or a frame is damaged or missing.
    """
    detokenizer = Detokenizer(codec)
    opener, sealer = Opener(), Sealer(producer)
    while True:
        for frame in receiver.recv_many(MAX_FRAMES, MAX_BYTES, math.inf):
            message = decode_step(opener.open(frame))
            if not isinstance(message, StepOutput):
                to_api.send(sealer.seal(encode(message)), math.inf)
                return
            to_api.send(sealer.seal(encode(detokenizer.convert(message))), math.inf)


class Detokenizer:
    """Keeps a decoder for each request that is being answered."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._streams: dict[int, StreamDecoder] = {}

    def __len__(self) -> int:
        """How many requests are being answered."""
        return len(self._streams)

    def convert(self, output: StepOutput) -> TextOutput:
        """The same round as text."""
        for entry in output.started:
            if entry.output_ids:
                self._resume(entry)
        texts = [
            self._text(uid, token, finished)
            for uid, token, finished in zip(output.uids, output.tokens, output.finished, strict=True)
        ]
        return TextOutput(output.uids, output.tokens, texts, output.finished, output.started, output.pool)

    def _resume(self, entry: Started) -> None:
        """Go on where another detokenizer stopped, perhaps within a character: its text is known up to there."""
        stream = self._streams[entry.uid] = self._codec.stream()
        for token in entry.output_ids:
            stream.push(token)

    def _text(self, uid: int, token: int, finished: FinishReason | None) -> str:
        stream = self._streams.get(uid)
        if stream is None:
            stream = self._streams[uid] = self._codec.stream()
        # A rank stops at an end-of-text token only, which is no part of the text.
        text = stream.push(token) if token >= 0 and finished != "stop" else ""
        if finished is None:
            return text
        del self._streams[uid]
        return text + stream.flush()
