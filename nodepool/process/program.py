"""Shared parts of console programs: options, logging, one-line errors (CLI-1 and CLI-2)."""

from __future__ import annotations

import argparse
import gc
import logging
import math
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TextIO

from nodepool.base.names import did_you_mean
from nodepool.exceptions import NOT_PERMITTED
from nodepool.texts import escape_unencodable, printable
from nodepool.version import get_version_string

CONFIG_FILE = "/etc/nodepool/nodepool.yaml"
#: New objects between two garbage collections. Records are many and contain no cycles: 700, the
#: default, costs a tenth of the processor time of a launcher, and a quarter of that of a long list.
COLLECT_AFTER = 20_000


def absolute_path(text: str) -> str:
    """Return the expanded, absolute path: a daemon changes its directory (argument type)."""
    return os.path.abspath(os.path.expanduser(text))


def a_name(text: str) -> str:
    """Return the name of a thing; not one that means the place of all things (argument type)."""
    if text in ("", ".", ".."):
        raise argparse.ArgumentTypeError(f"{text!r} is not a valid name" if text else "it is empty")
    return text


class _Parser(argparse.ArgumentParser):
    """Suggests what may have been meant, instead of listing all that is possible."""

    def add_argument(self, *names: Any, **options: Any) -> argparse.Action:
        """Add an argument; a name is not empty, as a variable is whose command has failed."""
        if not (names and names[0].startswith("-")) and options.get("metavar") != "COMMAND":
            options.setdefault("type", a_name)
        return super().add_argument(*names, **options)

    def error(self, message: str) -> NoReturn:
        wrong = re.search(r"invalid choice: '(.*)' \(choose from (.*)\)\Z", message)
        close = did_you_mean(wrong[1], re.findall(r"[\w-]+", wrong[2])) if wrong else ""
        super().error(
            f"{message[: wrong.start(0)]}{wrong[1]} is unknown{close}"
            if wrong and close
            else message
        )


def make_parser(prog: str, description: str) -> argparse.ArgumentParser:
    """Return a parser with the options of all programs."""
    parser = _Parser(prog=prog, description=description)
    parser.add_argument(
        "-l", dest="logconfig", metavar="FILE", type=absolute_path, help="logging configuration"
    )
    parser.add_argument(
        "--version", action="version", version=f"Nodepool version: {get_version_string()}"
    )
    parser.add_argument(
        "-c",
        dest="config",
        metavar="FILE",
        type=absolute_path,
        default=CONFIG_FILE,
        help="configuration file (default: %(default)s)",
    )
    parser.add_argument(
        "-s",
        dest="secure",
        metavar="FILE",
        type=absolute_path,
        default=None,
        help="file with secrets",
    )
    return parser


def whole_number(least: int, most: float = math.inf) -> Callable[[str], int]:
    """Return an argument type: a whole number in these limits."""
    limits = f"at least {least}" + (f" and at most {most}" if most < math.inf else "")

    def parse(text: str) -> int:
        if not text.strip().lstrip("+").isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"must be a whole number of {limits}, not {text!r}")
        return int(text)

    return parse


def seconds(text: str) -> float:
    """Return a time in seconds, more than 0 (argument type)."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(
            f"must be a number of seconds greater than 0, not {text!r}"
        )
    return number


def duration(text: str) -> float:
    """Return the seconds of a time such as ``90``, ``15m``, ``4h`` or ``2d`` (argument type)."""
    units = {"s": 1, "m": 60, "h": 3600, "d": 86400}
    try:
        return seconds(text) if text[-1:] not in units else seconds(text[:-1]) * units[text[-1]]
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"must be a time such as 30s, 15m, 4h or 2d, not {text!r}"
        ) from None


class _StandardError(logging.StreamHandler[TextIO]):
    """Standard error as it is now, not as it was when logging was configured."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


def setup_command_logging(debug: bool, logconfig: str | None) -> None:
    """Configure logging of ``nodepool`` (CFG-15.1): ``debug`` overrides ``-l``."""
    from nodepool.logconfig import LOG_FORMAT, load_config

    if logconfig and not debug:
        load_config(logconfig).apply()
        return
    level = logging.DEBUG if debug else logging.INFO
    logging.basicConfig(level=level, format=LOG_FORMAT, handlers=[_StandardError()])
    if not debug:
        # The audit log of commands is for those who configure it (-l): scripts read standard error.
        for name in ("kazoo", "nodepool.ComponentRegistry", "nodepool.audit"):
            logging.getLogger(name).setLevel(logging.WARNING)


def _is_refused(error: BaseException) -> bool:
    """Return whether an access control list of ZooKeeper has refused a call."""
    from kazoo.exceptions import NoAuthError

    return isinstance(error, NoAuthError)


def describe(error: BaseException) -> str:
    """Return one line for users."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    text = "; ".join(line.strip() for line in str(error).splitlines() if line.strip())
    if _is_refused(error):
        return NOT_PERMITTED
    if isinstance(error, KeyError) and type(error).__str__ is KeyError.__str__:
        text = f"missing key {text}"
    return text or type(error).__name__


def report_error(prog: str, error: BaseException, debug: bool) -> None:
    if debug:
        traceback.print_exception(error, file=sys.stderr)
    print(printable(f"{prog}: error: {describe(error)}"), file=sys.stderr)


def collect_garbage_rarely() -> None:
    gc.set_threshold(max(COLLECT_AFTER, gc.get_threshold()[0]))


def ending_signals() -> list[signal.Signals]:
    """Return the signals that end a program at a terminal; without SIGHUP below ``nohup``."""
    found = [signal.SIGINT, signal.SIGTERM]
    return found if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [*found, signal.SIGHUP]


def _open_closed_streams() -> None:
    """Open standard streams that are closed: the next file would get their descriptors.

    The same holds for programs that this one starts.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(descriptor, True)
            setattr(sys, name, os.fdopen(descriptor, mode))


def run_console(prog: str, main: Callable[[], int | None], debug: bool) -> int:
    """Run ``main``; a failure becomes one line on standard error and status 1."""
    _open_closed_streams()
    collect_garbage_rarely()
    escape_unencodable()
    try:
        status = main()
        sys.stdout.flush()
        return status or 0
    except KeyboardInterrupt:
        print(f"{prog}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of our output ended early (``| head``): not an error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        report_error(prog, error, debug)
        return 1


def load_config(config_file: str, secure_file: str | None, providers: bool = True) -> Any:
    """Load main and secure configuration.

    :param providers: whether to load ``providers``, with their drivers and the descriptions of
        their clouds.
    :raises ConfigurationError: the configuration cannot be used.
    """
    from nodepool.config.loading import load_both
    from nodepool.config.source import Source

    return load_both(Source(config_file), Source(secure_file) if secure_file else None, providers)


def arguments(argv: Sequence[str] | None) -> list[str]:
    return list(sys.argv[1:] if argv is None else argv)
