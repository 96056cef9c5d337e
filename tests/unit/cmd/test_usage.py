"""``nodepool usage`` from a file."""

from __future__ import annotations

import json
import pathlib

import pytest

from nodepool.cmd.nodepoolcmd import main
from nodepool.status.usage import Use
from nodepool.status.usage_file import create


def test_file_is_read_without_zookeeper(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, file = tmp_path / "nodepool.yaml", tmp_path / "usage.sqlite"
    path.write_text(
        f"zookeeper-servers: [{{host: 127.0.0.1, port: 1}}]\nzookeeper-insecure: true\n"
        f"usage-log: {file}\n"
    )
    with create(str(file)) as opened:
        opened.write([Use("1", label="small", began=1e9, removed=1e9 + 3600)], lambda _use: None)
    for more in ([], ["--log", str(file)]):
        command = ["-c", str(path), "--connect-timeout", "1", "usage", *more, "--json"]
        monkeypatch.setattr("sys.argv", ["nodepool", *command])
        assert not main()
        out, err = capsys.readouterr()
        assert [(row["label"], row["used_hours"]) for row in json.loads(out)] == [("small", 1.0)]
        assert str(file) in err
