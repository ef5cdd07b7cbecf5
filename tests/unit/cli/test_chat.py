from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event

import httpx
import pytest

from tpserve.cli.chat import Conversation, ServerError, _typed
from tpserve.frontend.text import TextCodec
from tpserve.messages import Generate
from tpserve.testing.fake_server import FakeServer
from tpserve.testing.models import make_tokenizer
from tpserve.tokens import unpack_ids

COMMAND = [sys.executable, "-m", "tpserve.cli.main", "chat"]


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    return TextCodec.from_folder(make_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="module")
def server(codec: TextCodec) -> Iterator[FakeServer]:
    """Answers with the whole conversation, with brackets instead of special tokens."""
    brackets = {1: codec.encode("[")[0], 2: codec.encode("]")[0], codec.encode("\n")[0]: codec.encode("|")[0]}

    def script(request: Generate) -> Iterator[int]:
        return (brackets.get(token, token) for token in unpack_ids(request.prompt_ids))

    with FakeServer(codec, script) as server:
        yield server.start()


@pytest.fixture
def client(server: FakeServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60.0) as client:
        yield client


def said(conversation: Conversation, text: str) -> str:
    return "".join(conversation.ask(text))


def test_a_conversation_remembers_until_it_is_reset(client: httpx.Client) -> None:
    conversation = Conversation(client, "", {})
    first = said(conversation, "a \u2028 ü")
    assert first == "[user|a \u2028 ü]|[assistant|"
    assert said(conversation, "b") == f"[user|a \u2028 ü]|[assistant|{first}]|[user|b]|[assistant|"
    conversation.reset()
    assert said(conversation, "c") == "[user|c]|[assistant|"


def test_the_system_message_stays(client: httpx.Client) -> None:
    conversation = Conversation(client, "Be.", {})
    said(conversation, "a")
    conversation.reset()
    assert said(conversation, "b") == "[system|Be.]|[user|b]|[assistant|"


def test_settings_reach_the_server(client: httpx.Client, server: FakeServer) -> None:
    said(Conversation(client, "", {"temperature": 0.0, "max_tokens": 7}), "a")
    request = [message for message in server.seen if isinstance(message, Generate)][-1]
    assert (request.params.temperature, request.params.max_tokens) == (0.0, 7)
    said(Conversation(client, "", {"temperature": None, "max_tokens": None}), "a")


def test_what_is_refused_is_forgotten(client: httpx.Client) -> None:
    conversation = Conversation(client, "", {})
    with pytest.raises(ServerError, match="the context holds 400") as error:
        said(conversation, "x" * 500)
    assert error.value.exit_code == 2
    assert said(conversation, "b") == "[user|b]|[assistant|"


@pytest.mark.parametrize(
    ("event", "says"),
    [
        ("x", "an event that cannot be read: JSON is malformed"),
        ('{"more": ' + 5000 * "[" + 5000 * "]" + "}", "an event that cannot be read: nested too deep"),
        ("[]", "an event that cannot be read: Expected `object`, got `array`"),
        ("{}", "an event that cannot be read: 'choices'"),
        ('{"choices": [[]]}', "an event that cannot be read: "),
        ('{"error": {"message": "a rank died"}}', "^a rank died$"),
    ],
)
def test_an_event_that_is_none_of_a_chat_is_told(event: str, says: str) -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(200, text=f"data: {event}\n\n"))
    with httpx.Client(base_url="http://x", transport=transport) as client, pytest.raises(ServerError, match=says):
        said(Conversation(client, "", {}), "a")


class Halting(FakeServer):
    """Answers ``so`` and stands still, until released; then it echoes the conversation."""

    def __init__(self, codec: TextCodec) -> None:
        self.release = Event()
        self._so = codec.encode("so")
        super().__init__(codec, self._answer)

    def _answer(self, request: Generate) -> Iterator[int]:
        yield from self._so
        if request.uid:  # the warm-up is 0
            self.release.wait()
        yield from (token for token in unpack_ids(request.prompt_ids) if token > 2)


@pytest.fixture
def halting(codec: TextCodec) -> Iterator[Halting]:
    with Halting(codec) as server:
        server.start()
        yield server
        server.release.set()


def test_an_interrupted_answer_is_remembered_as_far_as_it_came(halting: Halting) -> None:
    with httpx.Client(base_url=halting.url, timeout=60.0) as client:
        conversation = Conversation(client, "", {})
        pieces = conversation.ask("a")
        assert next(pieces) == "so"
        pieces.close()
        halting.release.set()
        assert said(conversation, "b") == "souser\na\nassistant\nso\nuser\nb\nassistant\n"


def run(lines: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], input=lines, capture_output=True, text=True, timeout=60, check=False)


def test_lines_of_a_pipe_are_prompts(server: FakeServer) -> None:
    found = run("a\n\n/reset\nb\n/quit\nc\n", "--url", f"{server.url}/v1/", "--system", "S")
    assert (found.returncode, found.stderr) == (0, "")
    assert found.stdout == "[system|S]|[user|a]|[assistant|\n[system|S]|[user|b]|[assistant|\n"


def test_a_script_hears_of_a_refusal_by_the_exit_code(server: FakeServer) -> None:
    found = run("a\nb\n", "--url", server.url, "--max-tokens", "400")
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr.startswith("error: ")
    assert found.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--system", "a\udcff"), r"--system: 'a\udcff' is not text in UTF-8"),
        (("--temperature", "9"), "--temperature: expected a number from 0 to 2, found 9.0"),
        (("--temperature", "nan"), "--temperature: expected a number from 0 to 2, found nan"),
        (("--max-tokens", "0"), "--max-tokens: expected an integer from 1 to 2147483647, found 0"),
        (("--max-tokens", f"{1 << 31}"), "--max-tokens: expected an integer from 1 to 2147483647, found 2147483648"),
    ],
)
def test_wrong_flags_are_told_before_anything_is_said(flags: tuple[str, str], says: str) -> None:
    found = run("", "--url", "http://127.0.0.1:9", *flags)
    assert (found.returncode, found.stdout, found.stderr) == (2, "", f"error: {says}\n")


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="there is no /dev/full")
def test_an_answer_that_cannot_be_written_is_told_in_one_line(server: FakeServer) -> None:
    with Path("/dev/full").open("wb") as full:
        found = subprocess.run(
            [*COMMAND, "--url", server.url],
            input="a\nb\n",
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert (found.returncode, found.stderr) == (
        2,
        "error: standard output cannot be written: No space left on device\n",
    )


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://127.0.0.1:9", "no server answers at http://127.0.0.1:9"),
        ("http://a b", "'http://a b' is no address of a server"),
        *[
            (url, f"{url} is no address of a server")
            for url in ("nonsense", "http://", "http://[::1", "http://a..com", "http://127.0.0.1:99999")
        ],
    ],
)
def test_without_a_server_there_is_one_clear_line_and_a_hint(url: str, words: str) -> None:
    found = run("a\n", "--url", url)
    assert (found.returncode, found.stdout) == (2, "")
    error, hint = found.stderr.splitlines()
    assert error == f"error: {words}"
    assert hint.startswith("hint: ")


def test_another_kind_of_server_is_recognised(server: FakeServer) -> None:
    found = run("a\n", "--url", f"{server.url}/nothing/here")
    assert found.returncode == 2
    assert "is no tpserve server" in found.stderr


def test_at_the_prompt_ctrl_c_begins_a_new_line(monkeypatch: pytest.MonkeyPatch) -> None:
    keys: list[str | BaseException] = [" a ", KeyboardInterrupt(), "", "b", EOFError()]

    def typed(prompt: str) -> str:
        key = keys.pop(0)
        if isinstance(key, BaseException):
            raise key
        return key

    monkeypatch.setattr("builtins.input", typed)
    assert list(_typed()) == ["a", "b"]


class Terminal:
    """``tpserve chat`` in a terminal."""

    def __init__(self, process: subprocess.Popen[bytes], master: int) -> None:
        self.process = process
        self._master = master
        self._seen = b""

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def expect(self, text: str) -> str:
        """Read on until ``text`` comes; what came before it."""
        while text.encode() not in self._seen:
            assert self._read(60.0), f"{text!r} does not come after {self._seen!r}"
        before, self._seen = self._seen.split(text.encode(), 1)
        return before.decode()

    def _read(self, seconds: float) -> bool:
        ready, _, _ = select.select([self._master], [], [], seconds)
        if ready:
            self._seen += os.read(self._master, 4096)
        return bool(ready)


@contextmanager
def terminal(url: str, home: Path) -> Iterator[Terminal]:
    master, slave = pty.openpty()
    environment = {**os.environ, "TERM": "dumb", "HOME": str(home)}
    process = subprocess.Popen([*COMMAND, "--url", url], stdin=slave, stdout=slave, stderr=slave, env=environment)
    os.close(slave)
    try:
        yield Terminal(process, master)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(master)


def test_in_a_terminal_commands_are_obeyed_and_ctrl_d_leaves(server: FakeServer, tmp_path: Path) -> None:
    with terminal(server.url, tmp_path) as screen:
        assert "/reset forgets" in screen.expect("> ")
        screen.type("one\n")
        screen.expect("[user|one]|[assistant|")
        screen.expect("> ")
        screen.type("/reset\n")
        screen.expect("> ")
        screen.type("two\n")
        screen.expect("[user|two]|[assistant|")
        screen.expect("> ")
        screen.type("\x04")


def test_in_a_terminal_ctrl_c_interrupts_an_answer(halting: Halting, tmp_path: Path) -> None:
    with terminal(halting.url, tmp_path) as screen:
        screen.expect("> ")
        screen.type("a\n")
        screen.expect("so")
        screen.process.send_signal(signal.SIGINT)
        screen.expect("…")
        halting.release.set()
        screen.expect("> ")
        screen.type("/quit\n")
