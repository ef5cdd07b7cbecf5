"""``tpserve chat``: talk to a running server in the terminal, or put prompts to it from a script, one a line."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator, Iterator
from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from tpserve.cli.common import command_app, sampling_fields
from tpserve.errors import ConfigError, LaunchError, TpserveError
from tpserve.values import is_text, read_json

if TYPE_CHECKING:
    import httpx

__all__ = ["Conversation", "app"]

app = command_app()

HELP = "/reset forgets the conversation, /quit or Ctrl-D leaves, Ctrl-C interrupts an answer."


@app.command()
def chat(
    url: Annotated[str, typer.Option(help="Where the server is.")] = "http://127.0.0.1:8000",
    system: Annotated[str, typer.Option(help="The system message.")] = "",
    temperature: Annotated[float | None, typer.Option(help="0 is greedy; the server's default otherwise.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens of an answer.")] = None,
) -> None:
    """Talk to a running server in the terminal. With its input from a pipe, each line is a prompt."""
    import httpx

    from tpserve.bench.http import read_origin

    read_origin(url)  # for its errors: httpx has many kinds, and some addresses it only fails to find
    if not is_text(system):
        raise ConfigError(f"--system: {system!r} is not text in UTF-8")
    settings = sampling_fields(temperature=temperature, max_tokens=max_tokens)
    is_terminal = sys.stdin.isatty()
    base = url.rstrip("/").removesuffix("/v1")
    with _reachable(url), httpx.Client(base_url=base, timeout=httpx.Timeout(None, connect=10.0)) as client:
        conversation = Conversation(client, system, settings)
        model = conversation.model()
        if is_terminal:
            typer.echo(f"{model} at {url}. {HELP}")
        for text in _typed() if is_terminal else _piped():
            if text == "/quit":
                break
            if text == "/reset":
                conversation.reset()
            elif (code := _answer(conversation, text)) and not is_terminal:
                raise typer.Exit(code)


class ServerError(TpserveError):
    """The server refuses a request, or breaks off its answer.

    Args:
        message: what it says.
        exit_code: 2 if a flag or a prompt is wrong, else 1.
    """

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Conversation:
    """What was said so far.

    Args:
        client: with the server's address.
        system: the system message, or empty.
        settings: further fields of each request.
    """

    def __init__(self, client: httpx.Client, system: str, settings: dict[str, Any]) -> None:
        self._client = client
        self._settings = settings
        self._beginning = [{"role": "system", "content": system}] if system else []
        self._messages = list(self._beginning)

    def model(self) -> str:
        """The model that the server has.

        Raises:
            LaunchError: it does not say.
        """
        response = self._client.get("/v1/models")
        try:
            return str(read_json(response.content, dict[str, Any])["data"][0]["id"])
        except (msgspec.DecodeError, LookupError, TypeError):
            raise LaunchError(
                f"what answers at {self._client.base_url} is no tpserve server", "Give its address with --url."
            ) from None

    def reset(self) -> None:
        """Forget all but the system message."""
        self._messages = list(self._beginning)

    def ask(self, text: str) -> Generator[str, None, None]:
        """Say something; yields the answer as it comes.

        An answer that is interrupted is remembered as far as it came; a question without one is forgotten.

        Raises:
            ServerError: the server refuses, or breaks off.
        """
        question = {"role": "user", "content": text}
        answer = ""
        try:
            for piece in self._stream([*self._messages, question]):
                answer += piece
                yield piece
        finally:
            if answer:
                self._messages += [question, {"role": "assistant", "content": answer}]

    def _stream(self, messages: list[dict[str, str]]) -> Iterator[str]:
        body = {"messages": messages, "stream": True, **self._settings}
        with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                is_mendable = response.is_client_error and response.status_code != HTTPStatus.TOO_MANY_REQUESTS
                raise ServerError(_error_message(response.read()), 2 if is_mendable else 1)
            for data in _events(response.iter_bytes()):
                yield from _pieces(data)


def _answer(conversation: Conversation, text: str) -> int:
    """Print the answer as it comes; the exit code, 0 if it came to its end or was interrupted by the user."""
    try:
        with contextlib.closing(conversation.ask(text)) as pieces:
            for piece in pieces:
                typer.echo(piece, nl=False)
                sys.stdout.flush()
    except KeyboardInterrupt:
        typer.echo(" …", nl=False)
    except ServerError as error:
        typer.echo(f"error: {error}", err=True)
        return error.exit_code
    typer.echo()
    return 0


def _typed() -> Iterator[str]:
    """What a person types, until Ctrl-D."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (gives input() a history and line editing)
    while True:
        try:
            text = input("> ").strip()
        except EOFError:
            typer.echo()
            return
        except KeyboardInterrupt:
            typer.echo()
            continue
        if text:
            yield text


def _piped() -> Iterator[str]:
    """The lines of standard input."""
    for line in sys.stdin.buffer:
        if text := line.decode(errors="replace").strip():
            yield text


def _events(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """The data of server-sent events, up to [DONE]."""
    rest = b""
    for chunk in chunks:
        *events, rest = (rest + chunk).split(b"\n\n")
        for event in events:
            data = event.removeprefix(b"data: ")
            if data == b"[DONE]":
                return
            yield data


def _pieces(event: bytes) -> list[str]:
    """The pieces of text in an event.

    Raises:
        ServerError: it tells of an error, or is none of a chat.
    """
    try:
        found = read_json(event, dict[str, Any])
        if "error" in found:
            raise ServerError(str(found["error"]["message"]))
        pieces = (choice["delta"].get("content") for choice in found["choices"])
        return [str(piece) for piece in pieces if piece]
    except (msgspec.DecodeError, LookupError, TypeError, AttributeError) as error:
        raise ServerError(f"the server sent an event that cannot be read: {error}") from None


def _error_message(body: bytes) -> str:
    try:
        return str(read_json(body, dict[str, Any])["error"]["message"])
    except (msgspec.DecodeError, LookupError, TypeError):
        return body.decode(errors="replace")


@contextlib.contextmanager
def _reachable(url: str) -> Iterator[None]:
    """Say plainly that nobody answers, or that the server has gone."""
    import httpx

    from tpserve.bench.http import no_address

    try:
        yield
    except httpx.InvalidURL as error:
        raise no_address(url) from error
    except httpx.ConnectError as error:
        raise LaunchError(f"no server answers at {url}", "Start one with `tpserve launch`.") from error
    except httpx.TransportError as error:
        raise LaunchError(f"the connection to {url} broke: {error}", "Is the server still running?") from error
