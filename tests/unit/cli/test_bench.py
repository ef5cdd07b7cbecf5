"""What ``tpserve bench`` says of mistakes, before anything is started."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tpserve.cli.common import write_output
from tpserve.cli.main import main
from tpserve.errors import ConfigError
from tpserve.outputs import check_output
from tpserve.testing.models import make_model

Refused = Callable[..., str]


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Run a bench that must end with exit code 2; what it says."""

    def run(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["tpserve", "bench", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 2
        return capsys.readouterr().err

    return run


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--a zqm", "error: there is no transport plugin named 'zqm'\nhint: Available: "),
        ("--a inproc", "error: transport.inproc works inside one process only\nhint: tpserve plugins list"),
        ("--a zmq,sync=glo", "error: there is no sync plugin named 'glo'"),
        ("--a zmq -o transport.bach=1", "error: -o transport.bach=1: no transport has an option 'bach'"),
        ("--a zmq -o transport.batch", "error: -o transport.batch: no value"),
        ("--a zmq sync=gloo", "error: sync=gloo: only --matrix takes axes"),
        ("--matrix transport", "error: 'transport' is no axis of a matrix"),
        ("--a zmq --size 16X", "error: --size: expected bytes"),
        ("--a zmq --messages few", "error: --messages: expected numbers"),
        ("--a zmq --json nowhere/x.json", "error: nowhere/x.json: there is no folder"),
        ("--a zmq --html /", "error: / is a folder"),
        (
            "--a zmq --json x --html ./x",
            "error: --json and --html would both write x\nhint: Give each a file of its own",
        ),
        ("--a zmq --arrival trace --trace t --json t", "error: --json would overwrite t, read as the file of --trace"),
        ("--a zmq --arrival poisson --free-running", "error: --arrival and --free-running are two different paces"),
        ("--a zmq --arrival trace", "error: --arrival trace needs --trace FILE"),
        ("--a zmq --heartbeat 5 --watchdog 2", "error: heartbeat is 5 s and watchdog 2 s"),
        ("--a zmq --cpu-affinity 0;1;2", "error: cpu_affinity has 3 lists of cores for 2 ranks"),
        ("--arm zmq --arm zmq", "hint: Give one of them another name with name="),
        ("--a zmq --gap 10 --arrival poisson", "error: --gap lies between paced rounds"),
        ("--a zmq --gap 10 --free-running", "error: --gap lies between paced rounds"),
        ("--a zmq --step 10 --free-running", "error: --step lies between paced rounds"),
        ("--a zmq --rate 1000", "error: --rate is that of messages that arrive by themselves"),
        ("--a zmq --rate 1000 --arrival trace --trace x", "error: --rate is that of messages that arrive"),
        ("--a zmq --messages 2 --arrival trace --trace x", "error: --messages is how many there are in a round"),
        ("--a zmq --trace x", "error: --trace says when messages arrive by themselves"),
        ("--a zmq --trace x --arrival poisson", "error: --trace says when messages arrive by themselves"),
        ("--b zmq", "hint: --b needs --a"),
        ("--b zmq --arm nng", "hint: --b needs --a"),
        ("--a zmq --watchdog 0.001", "error: --watchdog: expected a number from 1 to 1000000, found 0.001"),
        ("--a zmq --watchdog 0.1", "error: --watchdog: expected a number from 1 to 1000000, found 0.1"),
        ("--a zmq --heartbeat 0", "error: --heartbeat: expected a number from 0.01 to 1000000, found 0.0"),
        ("--messages 1", "error: there is nothing to compare"),
    ],
)
def test_a_mistake_ends_with_exit_code_2(
    arguments: str, says: str, refused: Refused, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert says in refused("transport", *arguments.split())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "error: there is nothing to measure\nhint: Write --url URL, or --a 'FLAGS' --b 'FLAGS'"),
        (["--url", "http://127.0.0.1:1", "--a", ""], "error: --url measures one server"),
        (
            ["--url", "http://127.0.0.1:1"],
            "error: no server answers at 127.0.0.1:1: the connection was refused\nhint: Start",
        ),
        (["--a", "--sync glo"], "error: A: the server did not start: there is no sync plugin named 'glo'\nhint: Did"),
        (["--a", "'"], "error: --a ': No closing quotation"),
        (["--a", "", "--request-rate", "fast"], "error: --request-rate: expected requests a second"),
        (["--a", "", "--metric-percentiles", "50,100"], "error: --metric-percentiles: expected numbers between"),
        (["--a", "", "--dataset-name", "sharegpt"], "error: --dataset-name sharegpt and --dataset-path FILE go"),
        (["--a", "", "--dataset-path", "x.json"], "error: --dataset-name sharegpt and --dataset-path FILE go"),
        (["--a", "", "--backend", "openai-chat"], "error: --dataset-name random sends token ids"),
        (["--a", "--help"], "error: A: the bench starts servers its own way, without --help\nhint: Leave --help out"),
        (["--a", "", "--b", "--port=1"], "error: B: the bench starts servers its own way, without --port=1"),
        (["--b", "--sync gloo"], "hint: --b needs --a"),
        (["--a", "", "--json", "/"], "error: / is a folder"),
        (["--a", "", "--json", "x", "--html", "x"], "error: --json and --html would both write x"),
        (["--a", "--record x", "--b", "--record ./x"], "error: A's record and B's record would both write x"),
        (["--a", "--profile .", "--html", "rank0.json"], "error: --html and A's profile would both write rank0.json"),
        (["--a", "--config c.yaml", "--json", "c.yaml"], "error: --json would overwrite c.yaml, read as A's --config"),
        (
            ["--a", "--config=c.yaml", "--b", "--record c.yaml"],
            "error: B's record would overwrite c.yaml, read as A's --config",
        ),
        (
            ["--a", "", "--dataset-name", "sharegpt", "--dataset-path", "x", "--json", "x"],
            "error: --json would overwrite x, read as the file of --dataset-path",
        ),
        (["--a", "", "--html", "nowhere/x.html"], "error: nowhere/x.html: there is no folder"),
    ],
)
def test_so_does_one_about_whole_servers(
    arguments: list[str], says: str, refused: Refused, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text("threads: 1")
    assert says in refused("serve", *arguments)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--json nowhere/x.json", "error: nowhere/x.json: there is no folder"),
        ("--json /", "error: / is a folder"),
        ("cache", "error: cache: no setting"),
        ("--b cach=none", "error: cach: there is no such setting"),
        ("--a cache=none,page-size=4,cache=radix", "error: cache=radix: cache is given twice"),
        ("page-size=4 page_size=8", "error: page_size=8: page_size is given twice"),
        ("--b cache=nine", "error: cache: expected "),
        ("--b policy=fcsf", "error: there is no policy plugin named 'fcsf'"),
        ("--b record=x --json x", "error: the report and arm b's record would both write x"),
        ("--json model/config.json", "error: the report would overwrite"),
        ("--requests 100000000000000000000", "Invalid value for '--requests'"),
        ("--repeats 100000000000000000000", "Invalid value for '--repeats'"),
    ],
)
def test_so_does_one_about_engines(
    arguments: str, says: str, refused: Refused, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whatever arm it is in, before the first is loaded."""
    monkeypatch.setattr("tpserve.bench.offline.LLM", None)
    model = make_model(tmp_path / "model", "llama")
    monkeypatch.chdir(tmp_path)
    assert says in refused("offline", "--model", str(model), *arguments.split())


def test_a_folder_in_which_nothing_can_be_made_is_told_before_anything_runs(refused: Refused) -> None:
    """Permissions do not tell of it: root may write in /proc."""
    for bench, flag in (("transport", "--json"), ("transport", "--html"), ("serve", "--json"), ("offline", "--json")):
        arm = [] if bench == "offline" else ["--a", "zqm"]
        assert "error: /proc/tpserve.x cannot be written: " in refused(bench, *arm, flag, "/proc/tpserve.x")


def test_trying_whether_a_file_can_be_written_leaves_nothing_and_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("figures")
    (tmp_path / "link").symlink_to(tmp_path / "new")
    check_output(tmp_path / "new", tmp_path / "old", tmp_path / "link")

    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "old"]
    assert (tmp_path / "old").read_text() == "figures"


def test_a_file_that_is_there_must_be_one_that_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "old").write_text("figures")
    monkeypatch.setattr("os.access", lambda *_: False)  # as root may write all
    with pytest.raises(ConfigError, match=r"old cannot be written$"):
        check_output(tmp_path / "old")


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="there is no /dev/full")
def test_a_disk_that_is_full_in_the_end_is_told() -> None:
    with pytest.raises(ConfigError, match="/dev/full cannot be written: No space left"):
        write_output(Path("/dev/full"), b"figures")
