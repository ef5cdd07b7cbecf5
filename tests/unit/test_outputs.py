"""What files are the same, whatever they are called."""

from __future__ import annotations

from pathlib import Path

import pytest

from tpserve.config import ServeConfig
from tpserve.errors import ConfigError
from tpserve.outputs import check_apart, check_outputs


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("old").write_text("figures")
    Path("hard").hardlink_to("old")
    Path("soft").symlink_to("old")
    Path("to-be").symlink_to("new")
    Path("models").mkdir()
    Path("models/weights").symlink_to(tmp_path / "old")
    return tmp_path


@pytest.mark.parametrize(
    ("one", "other"),
    [("old", "old"), ("old", "hard"), ("old", "models/../soft"), ("new", "./new"), ("new", "to-be"), ("new", "new/x")],
)
def test_one_file_has_one_writer(one: str, other: str, folder: Path) -> None:
    for pair in ((one, other), (other, one), (str(folder / one), other)):
        with pytest.raises(ConfigError, match=r"^(a and b|a would write|b would write)"):
            check_apart(zip("ab", map(Path, pair), strict=True))
    assert Path("old").read_text() == "figures"


@pytest.mark.parametrize("written", ["old", "hard", "soft", "models/weights"])
@pytest.mark.parametrize("read", ["old", "models"])
def test_what_is_read_is_not_written(written: str, read: str) -> None:
    with pytest.raises(
        ConfigError, match=r"^--json would overwrite (old|models/weights), read as the model. Choose another"
    ):
        check_apart([("--json", Path(written))], [("the model", Path(read))])


def test_a_model_in_ones_home_is_read_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder))
    with pytest.raises(ConfigError, match=r"record would overwrite \S+/models/weights, read as model"):
        check_outputs(ServeConfig(model="~/models", record="old"))


def test_all_else_is_apart() -> None:
    null = Path("/dev/null")
    check_apart([("a", null), ("b", null), ("c", None), ("d", Path("models/new")), ("e", Path("models/more"))])
    check_apart([("a", Path("models/new")), ("b", Path("new"))], [("the model", Path("models")), ("other", Path("no"))])
    check_outputs(ServeConfig(model="models", record="models/new", profile="models", tp=2))
    check_outputs(ServeConfig(model="~nobody-of-this-name/x", record="new"))
    assert not Path("models/new").exists()


@pytest.mark.parametrize(
    ("profile", "says"),
    [
        ("ring", r"in ring: \S*ring is a link to nothing. Remove it"),
        ("to-be/x", r"in to-be/x: \S*/to-be is a link to nothing. Remove it"),
        ("traces", r"traces/rank1.json is a folder"),
        ("linked", r"linked/rank0.json: there is no folder .*/nowhere"),
        ("old", "in old: Not a directory"),
    ],
)
def test_places_where_no_traces_can_be(profile: str, says: str) -> None:
    Path("ring").symlink_to("ring")
    Path("traces/rank1.json").mkdir(parents=True)
    Path("linked").mkdir()
    Path("linked/rank0.json").symlink_to("../nowhere/x")
    with pytest.raises(ConfigError, match=says):
        check_outputs(ServeConfig(model="models", profile=profile, tp=2))
