"""GitLab's custom executor: each job runs on a leased node.

GitLab Runner starts this program for each stage of a job: ``config``, ``prepare`` (lease a node),
``run`` (one script of the job on the node), ``cleanup`` (return it). What the job may influence,
such as its variables, decides nothing here: the label and the tenant come from the runner's
configuration and from the description of the job that GitLab has sent.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import json
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata

from nodepool.client import (
    MOST_INPUT,
    SHOWN,
    Done,
    Lease,
    NodepoolError,
    NotAllowed,
    Pool,
    read_secret,
    seconds,
)
from nodepool.texts import escape_unencodable, one_line, print_text, printable

#: Seconds that a lease lasts longer than its job may, for the stages after the script.
AFTERWARDS = 900
#: Seconds of a job without a limit, and for the API to answer at first.
DEFAULT_TIMEOUT, FIRST_ANSWER = 3600, 30.0
#: For a small command on the node.
COMMAND_TIMEOUT = "60s"
#: Refusals that another attempt would get, too.
FINAL = ("bad-request", "unknown-label", "key-in-use")
#: In the temporary directory of an attempt.
KEPT = "nodepool-lease.json"


class JobError(Exception):
    """The job cannot run; the text is for its log. GitLab does not try again."""


class SystemFailure(Exception):
    """The environment is broken; the text is for the log of the job. GitLab may try again."""


@dataclass(frozen=True)
class Job:
    """A job, as GitLab has described it.

    :param key: identifies it among the jobs of all instances.
    :param timeout: seconds that it may run.
    """

    key: str
    id: int
    name: str
    project: str
    image: str
    timeout: int

    @classmethod
    def read(cls) -> Job:
        """Read the file that the runner has written.

        :raises JobError: there is none, or it is not a job.
        """
        path = os.environ.get("JOB_RESPONSE_FILE")
        if not path:
            raise JobError(
                "JOB_RESPONSE_FILE is not set: GitLab Runner (17 or later) starts this program, "
                "with its variables"
            )
        try:
            found = json.loads(pathlib.Path(path).read_text())
            info, number = found["job_info"], int(found["id"])
            project, name = str(info["project_full_path"]), str(info["name"])
            host = urllib.parse.urlsplit(str(found["git_info"]["repo_url"])).hostname
            image = str((found.get("image") or {}).get("name") or "")
            timeout = int((found.get("runner_info") or {}).get("timeout") or DEFAULT_TIMEOUT)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise JobError(
                f"{path} does not describe a job: {type(error).__name__}: {error}"
            ) from error
        if found.get("services"):
            raise JobError("services: are not supported by this runner; start them in the script")
        return cls(f"gitlab:{host}:{number}", number, name, project, image, timeout)


class Kept:
    """The lease of this attempt, known to its later stages; readable by this user only."""

    def __init__(self) -> None:
        self.folder = pathlib.Path(os.environ.get("TMPDIR") or "/tmp")
        self._path = self.folder / KEPT

    def write(self, lease: Lease) -> None:
        with open(os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump({"id": lease.id, "token": lease.token}, file)

    def lease(self, pool: Pool) -> Lease | None:
        try:
            found = json.loads(self._path.read_text())
        except (OSError, ValueError):
            return None
        return pool.get(found["id"], found["token"])


# -- the stages


def config(args: argparse.Namespace) -> None:
    print(
        json.dumps(
            {
                "driver": {"name": "nodepool", "version": metadata.version("nodepool")},
                "shell": args.shell,
                "builds_dir": args.builds_dir,
                "cache_dir": args.cache_dir,
                "builds_dir_is_shared": False,
                "job_env": {
                    "NODEPOOL_GITLAB_SHELL": args.shell,
                    "NODEPOOL_GITLAB_FOLDERS": f"{args.builds_dir}:{args.cache_dir}",
                },
            }
        )
    )


def prepare(args: argparse.Namespace) -> None:
    pool, job, kept = _pool(args), Job.read(), Kept()
    label = _label(args, job)
    me = pool.call("GET", "/me", retry=time.monotonic() + FIRST_ANSWER)
    wanted = job.timeout + AFTERWARDS
    lasts = wanted if me["longest"] is None else min(wanted, int(me["longest"]))
    if lasts < job.timeout:
        print_text(
            f"The lease ends after {lasts} s, before the job's limit of {job.timeout} s: that is "
            "the longest allowed"
        )
    tenant = args.tenant.replace("{namespace}", job.project.partition("/")[0]).replace(
        "{project}", job.project
    )

    def show_state(lease: Lease) -> None:
        kept.write(lease)
        if lease.state != "held":
            why = lease.why or {}
            place = (
                f"position {why['queue_position']} in the queue, "
                if why.get("queue_position")
                else ""
            )
            print_text(
                f"Waiting for a node {label} (lease {lease.id}): "
                f"{place}{why.get('text') or 'requested'}"
            )

    lease = pool.lease(
        label,
        for_=lasts,
        wait=job.timeout if args.wait is None else args.wait,
        key=job.key,
        notes={"key": job.key},
        on_change=show_state,
        tenant=None if me["tenant"] else tenant,
        purpose=one_line(f"job {job.id} {job.name} of {job.project}", 200),
    )
    folders = [
        shlex.quote(each)
        for each in os.environ.get("NODEPOOL_GITLAB_FOLDERS", "/builds:/cache").split(":")
    ]
    made, usable = " ".join(folders), " && ".join(f"test -w {each}" for each in folders)
    by_root = f'sudo -n mkdir -p {made} && sudo -n chown "$(id -un)" {made}'
    done = _quickly(lease, f"mkdir -p {made} 2>/dev/null && {usable} || {{ {by_root}; }}")
    if done.status:
        lease.give_back()  # the next attempt gets another node
        raise SystemFailure(
            f"{made} cannot be made on the node: "
            f"{done.stderr.decode(errors='replace').strip()[-500:]}"
        )
    node = lease.nodes[0]
    print_text(
        f"Running on node {node.id} ({label}, {node.provider}), lease {lease.id}, until "
        f"{lease.ends:%H:%M:%S %Z}"
    )


def _quickly(lease: Lease, command: str, data: bytes = b"") -> Done:
    """Run a small command on the node.

    :raises SystemFailure: it has not ended in time.
    """
    try:
        return lease.run(command, input=data, timeout=COMMAND_TIMEOUT)
    except subprocess.TimeoutExpired:
        raise SystemFailure(
            f"node {lease.nodes[0].id} does not answer: a small command there did not end within "
            f"{COMMAND_TIMEOUT}: {command[:100]}"
        ) from None


def _label(args: argparse.Namespace, job: Job) -> str:
    """Return the label for the job.

    :raises JobError: its image is not one of those that this runner offers.
    """
    name = job.image.removeprefix("nodepool/")
    if name and args.image:
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in args.image):
            return name
        raise JobError(
            f"image: {job.image} is not offered by this runner; it offers {', '.join(args.image)}"
        )
    if args.label is None:
        raise JobError(
            "the job needs image: with one of "
            f"{', '.join(args.image) or 'no label: --label is missing'}"
        )
    return str(args.label)


def run(args: argparse.Namespace) -> int:
    """Run one script of the job on the node; return the exit status for the runner."""
    lease = Kept().lease(_pool(args))
    if lease is None:
        raise SystemFailure("this job has no lease: its stage prepare did not succeed")
    shell, text = (
        os.environ.get("NODEPOOL_GITLAB_SHELL", "bash"),
        pathlib.Path(args.script).read_bytes(),
    )
    # A script that reads its standard input would read itself: it becomes a file.
    place = (
        f".nodepool-gitlab/{time.time_ns()}-"
        f"{''.join(c for c in args.stage if c.isalnum() or c == '_')}"
    )
    file = shlex.quote(place)
    for start in range(0, max(1, len(text)), MOST_INPUT):
        command = f"umask 077; mkdir -p .nodepool-gitlab && cat >> {file}"
        done = _quickly(lease, command, text[start : start + MOST_INPUT])
        if done.status:
            lease.refresh()
            raise SystemFailure(
                f"node {lease.nodes[0].id}: {done.stderr.decode(errors='replace').strip()[-500:]}"
            )
    try:
        # Removed before it runs: nothing of a canceled job remains. In sh, whatever the login shell
        # is.
        begin = f"exec 3<{file}; rm -f {file}; exec {shlex.quote(shell)} /dev/fd/3"
        status = lease.run(f"exec sh -c {shlex.quote(begin)}", stream=True).status
    except NodepoolError:
        lease.refresh()  # the reason may be that it has ended
        raise
    if status == 0:
        return 0
    if path := os.environ.get("BUILD_EXIT_CODE_FILE"):
        pathlib.Path(path).write_text(f"{status}\n")
    return _code("BUILD", 1)


def cleanup(args: argparse.Namespace) -> int:
    """Return the node of the job, whatever its state; always 0."""
    try:
        pool = _pool(args)
        with contextlib.suppress(NodepoolError):
            lease = Kept().lease(pool)
            if lease is not None:
                lease.give_back()
                return 0
        # The stage that asked for it may have been killed before it could write it down.
        key = Job.read().key
        for one in pool.leases(owner="me"):
            if (one.notes or {}).get("key") == key:
                one.give_back()
    except (NodepoolError, JobError, OSError, ValueError) as error:
        print(
            "nodepool: the node was not returned; it is released when the lease ends: "
            f"{printable(str(error))}",
            file=sys.stderr,
        )
    return 0


# -- the program


def _pool(args: argparse.Namespace) -> Pool:
    token = read_secret(args.token_file) if args.token_file else None
    return Pool(args.url, token, ssh_directory=str(Kept().folder / "ssh"), most_output=SHOWN)


def _code(kind: str, default: int) -> int:
    text = os.environ.get(f"{kind}_FAILURE_EXIT_CODE", "")
    return int(text) if text.isdecimal() else default


def create_parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        "nodepool-gitlab", description="GitLab's custom executor: run jobs on nodes of the pool."
    )
    made.add_argument(
        "--version", action="version", version=f"Nodepool version: {metadata.version('nodepool')}"
    )
    made.add_argument(
        "--url", help="of the API (default: $NODEPOOL_URL, or the socket of this machine)"
    )
    made.add_argument(
        "--token-file", metavar="FILE", help="with the token (default: $NODEPOOL_TOKEN)"
    )
    stages = made.add_subparsers(metavar="STAGE", required=True)

    def add(
        name: str, function: Callable[[argparse.Namespace], int | None], text: str
    ) -> argparse.ArgumentParser:
        stage = stages.add_parser(name, help=text, description=text)
        stage.set_defaults(function=function)
        return stage

    one = add("config", config, "print the settings for the runner")
    one.add_argument(
        "--shell", default="bash", help="of the scripts, as in config.toml (default: %(default)s)"
    )
    one.add_argument("--builds-dir", default="/builds", help="on the node (default: %(default)s)")
    one.add_argument("--cache-dir", default="/cache", help="on the node (default: %(default)s)")
    one = add("prepare", prepare, "lease a node for the job")
    one.add_argument("--label", help="of the node, unless the image: of the job names one")
    one.add_argument(
        "--image",
        metavar="PATTERN",
        action="append",
        default=[],
        help="labels that image: may name, such as 'small-*'; may be repeated",
    )
    one.add_argument(
        "--tenant",
        default="{namespace}",
        help="text with {namespace} (the top-level group) or {project}; default: "
        "%(default)s. A token with a tenant has precedence",
    )
    one.add_argument(
        "--wait",
        metavar="TIME",
        type=seconds,
        help="longest time to wait for a node (default: the job's limit)",
    )
    one = add("run", run, "run a script of the job on its node")
    one.add_argument("script", metavar="SCRIPT")
    one.add_argument("stage", metavar="STAGE")
    add("cleanup", cleanup, "return the node of the job")
    return made


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Let a canceled job end this program in order: what it waits for is withdrawn."""

    def handle(number: int, _frame: object) -> None:
        signal.signal(number, signal.SIG_IGN)  # once is enough
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a stage; return the exit status that the runner expects."""
    args = create_parser().parse_args(argv)
    escape_unencodable()
    try:
        with _ended_by_signals():
            status: int | None = args.function(args)
            return status or 0
    except (NodepoolError, JobError, SystemFailure, OSError, ValueError) as error:
        print_text(f"nodepool: {error}")
        final = isinstance(error, JobError | NotAllowed) or (
            isinstance(error, NodepoolError) and error.code in FINAL
        )
        return _code("BUILD", 1) if final else _code("SYSTEM", 2)
    except Exception as error:
        print_text(f"nodepool: internal error: {type(error).__name__}: {error}")
        return _code("SYSTEM", 2)


if __name__ == "__main__":
    sys.exit(main())
