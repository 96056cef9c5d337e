from __future__ import annotations

import json
import logging
import sys

import pytest

from nodepool import logconfig


@pytest.fixture(autouse=True)
def keep_logging():
    """Put the process' logging back as it was."""
    names = ["", "nodepool", "requests", "openstack", "kazoo", "nodepool.ComponentRegistry"]
    saved = [
        (logging.getLogger(n), list(logging.getLogger(n).handlers), logging.getLogger(n).level)
        for n in names
    ]
    yield
    for logger, handlers, level in saved:
        for handler in logger.handlers:
            if handler not in handlers:
                handler.close()
        logger.handlers[:] = handlers
        logger.setLevel(level)


def record(text, *args, exc_info=None):
    return logging.LogRecord("nodepool.x", logging.INFO, __file__, 1, text, args, exc_info)


def test_multi_line_formatter_repeats_the_prefix():
    formatter = logconfig.MultiLineFormatter("%(levelname)s %(name)s: %(message)s")
    assert formatter.format(record("one %s", "word")) == "INFO nodepool.x: one word"
    assert (
        formatter.format(record("a\nb\nc"))
        == "INFO nodepool.x: a\nINFO nodepool.x:   b\nINFO nodepool.x:   c"
    )


def test_multi_line_formatter_tracebacks():
    formatter = logconfig.MultiLineFormatter(logconfig.LOG_FORMAT)
    try:
        raise ValueError("boom")
    except ValueError:
        rec = record("failed", exc_info=sys.exc_info())
    lines = formatter.format(rec).splitlines()
    assert all("INFO nodepool.x: " in line for line in lines)
    assert lines[0].endswith(": failed")
    assert lines[1].endswith(":   Traceback (most recent call last):")
    assert lines[-1].endswith(":   ValueError: boom")
    assert rec.msg == "failed"


def test_annotated_logger_order_and_missing_parts(caplog):
    caplog.set_level(logging.INFO)
    base = logging.getLogger("annotated")
    log = logconfig.get_annotated_logger(base, node_id="0000000001", event_id="ev")
    log.info("hello %s", "you")
    assert caplog.records[-1].getMessage() == "[e: ev] [node: 0000000001] hello you"
    assert caplog.records[-1].event_id == "ev"
    assert caplog.records[-1].node == "0000000001"
    same = logconfig.get_annotated_logger(log, node_request_id="100-0000000002")
    assert same is log
    same.info("again")
    assert (
        caplog.records[-1].getMessage()
        == "[e: ev] [node_request: 100-0000000002] [node: 0000000001] again"
    )
    assert caplog.records[-1].node_request == "100-0000000002"
    logconfig.get_annotated_logger(base).info("plain")
    assert caplog.records[-1].getMessage() == "plain"


def test_missing_logging_file_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=f"Unable to read logging config file at {tmp_path}/no"):
        logconfig.load_config(str(tmp_path / "no"))


def test_logging_file_is_named_when_it_cannot_be_used(tmp_path):
    with pytest.raises(ValueError, match=f"Logging config file {tmp_path} is a directory"):
        logconfig.load_config(str(tmp_path))
    path = tmp_path / "a.conf"
    path.write_text("[loggers]\nkeys=root\n")
    with pytest.raises(ValueError, match=f"{path}: missing section or option 'formatters'"):
        logconfig.load_config(str(path)).apply()


def test_formats_by_suffix(tmp_path):
    (tmp_path / "a.yaml").write_text("version: 1\n")
    (tmp_path / "a.json").write_text('{"version": 1}')
    (tmp_path / "a.conf").write_text("[loggers]\nkeys=root\n")
    (tmp_path / "b.yml").write_text("just text\n")
    (tmp_path / "c.yml").write_text("a: [\n")
    assert isinstance(logconfig.load_config(str(tmp_path / "a.yaml")), logconfig.DictLoggingConfig)
    assert isinstance(logconfig.load_config(str(tmp_path / "a.json")), logconfig.DictLoggingConfig)
    assert isinstance(logconfig.load_config(str(tmp_path / "a.conf")), logconfig.FileLoggingConfig)
    assert isinstance(logconfig.load_config(str(tmp_path / "b.yml")), logconfig.FileLoggingConfig)
    with pytest.raises(ValueError, match=r"c\.yml is not valid YAML"):
        logconfig.load_config(str(tmp_path / "c.yml"))


def test_server_config_foreground(capsys):
    config = logconfig.ServerLoggingConfig()
    config.apply()
    logging.getLogger("nodepool.NodePool").info("visible")
    logging.getLogger("nodepool.NodePool").debug("hidden")
    logging.getLogger("kazoo").info("hidden")
    logging.getLogger("something").error("hidden")
    out = capsys.readouterr().out
    assert out.endswith(" INFO nodepool.NodePool: visible\n") and out.count("\n") == 1


def test_server_config_debug(capsys):
    config = logconfig.ServerLoggingConfig()
    config.setDebug()
    config.apply()
    logging.getLogger("nodepool.NodePool").debug("visible")
    logging.getLogger("kazoo").info("hidden")
    assert capsys.readouterr().out.count("\n") == 1


def test_server_config_file(tmp_path, monkeypatch):
    monkeypatch.setattr(logconfig, "LOG_DIRECTORY", str(tmp_path))
    config = logconfig.ServerLoggingConfig(server="nodepool-builder")
    assert config.server == "nodepool-builder"
    config.apply()
    log = logging.getLogger("nodepool.builder")
    path = tmp_path / "nodepool-builder.log"
    log.info("first")
    path.rename(tmp_path / "old")
    log.info("second")
    assert "first" in (tmp_path / "old").read_text()
    assert path.read_text().endswith("INFO nodepool.builder: second\n")


def test_two_server_configs_do_not_share(tmp_path):
    first = logconfig.ServerLoggingConfig(server="nodepool")
    second = logconfig.ServerLoggingConfig()
    first.writeJson(str(tmp_path / "first.json"))
    second.writeJson(str(tmp_path / "second.json"))
    one, two = (json.loads((tmp_path / n).read_text()) for n in ("first.json", "second.json"))
    assert one["loggers"]["nodepool"]["handlers"] == ["normal"]
    assert two["loggers"]["nodepool"]["handlers"] == ["console"]
    assert '\n  "' in (tmp_path / "first.json").read_text()
