"""A server that does not start says why, in one line."""

from __future__ import annotations

import pytest

from tpserve.bench.server import composition, serving
from tpserve.errors import LaunchError


def test_wrong_flags_are_told_as_the_server_tells_them() -> None:
    with pytest.raises(LaunchError) as caught:
        composition(["--sync", "glo"])
    assert caught.value.message == "the server did not start: there is no sync plugin named 'glo'"
    assert caught.value.hint.startswith("Did you mean 'gloo'?")


def test_so_are_flags_that_do_not_exist() -> None:
    with pytest.raises(LaunchError, match="No such option: --nonsense"):
        composition(["--nonsense"])


def test_a_server_that_ends_before_it_is_ready_is_told() -> None:
    with pytest.raises(LaunchError, match="the server did not start: /nowhere "), serving(["/nowhere"]):
        raise AssertionError("it started")


def test_the_composition_is_that_of_the_flags() -> None:
    found = composition(["--tp", "3", "--sync", "gloo"])

    assert (found["config"]["tp"], found["composition"]["sync"]["name"]) == (3, "gloo")
