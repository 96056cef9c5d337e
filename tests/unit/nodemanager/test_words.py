"""What nodepool-nm says (users 13)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from nodepool.cmd import nm
from nodepool.exceptions import ConfigurationError
from nodepool.nodemanager import config
from nodepool.nodemanager.client.rpc import RpcFault


class Answers:
    """A node manager with these answers."""

    url = "unix:/x"

    def __init__(self, **answers: Any) -> None:
        self.answers = answers

    def call(self, method: str, *args: Any, timeout: float = 0) -> Any:
        answer = self.answers[method]
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_users_13_create_of_an_unknown_one() -> None:
    args = nm.create_parser().parse_args(["create", "beta"])
    client: Any = Answers(CreateSliver=RpcFault(nm.BAD_ARGUMENT, "there is no sliver beta here"))
    with pytest.raises(
        RpcFault,
        match="there is no sliver beta here; to create a new one, specify options such as --image "
        "host",
    ):
        args.function(client, args)


def test_users_13_a_failed_one_stays(capsys: pytest.CaptureFixture[str]) -> None:
    args = nm.create_parser().parse_args(["create", "beta", "--image", "host"])
    client: Any = Answers(PutRecord=1, WaitSliver={"state": "failed", "error": "no such image"})
    assert args.function(client, args) == 1
    assert (
        "no such image; it is kept for inspection" in (err := capsys.readouterr().err)
        and "`nodepool-nm delete beta`" in err
    )


def test_users_13_units_and_sources(capsys: pytest.CaptureFixture[str]) -> None:
    assert {"Memory MiB", "Limit MiB", "Disk MiB", "Sent bit/s", "Recv bit/s"} <= set(
        nm.TOP_COLUMNS.values()
    )
    sliver = {
        "name": "a",
        "state": "ready",
        "image": "host",
        "ssh_address": "h",
        "ssh_port": 1,
        "source": "driver",
        "error": None,
        "expiry": 0,
    }
    client: Any = Answers(ListSlivers=[sliver])
    nm.list_slivers(client, SimpleNamespace(format="table"))  # type: ignore[arg-type]
    assert "API call" in capsys.readouterr().out
    nm.list_slivers(client, SimpleNamespace(format="json"))  # type: ignore[arg-type]
    assert '"source": "driver"' in capsys.readouterr().out


def test_users_13_unknown_options_of_the_file() -> None:
    with pytest.raises(
        ConfigurationError, match=r"bakend: extra keys not allowed; did you mean backend\?"
    ):
        config.parse({"bakend": "native"}, "nodemanager.yaml")
    with pytest.raises(
        ConfigurationError, match=r"ssh\.adress: extra keys not allowed; did you mean address\?"
    ):
        config.parse({"ssh": {"adress": "h"}}, "nodemanager.yaml")
