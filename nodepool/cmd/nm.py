"""The ``nodepool-nm`` command: client of a node manager's API (NM-C.1, NM-C.5)."""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from nodepool import status
from nodepool.cmd.screen import Changes, screen
from nodepool.nodemanager.client.rpc import Client, RpcFault, Tls
from nodepool.nodemanager.client.texts import clean
from nodepool.process.program import absolute_path, arguments, run_console, seconds, whole_number
from nodepool.version import get_version_string

PROG = "nodepool-nm"
LIST_COLUMNS = {
    "name": "Name",
    "state": "State",
    "image": "Image",
    "ssh": "SSH",
    "guarantee": "CPU Guarantee",
    "memory": "Memory MiB",
    "expires": "Expires",
    "source": "Source",
    "error": "Error",
}
TOP_COLUMNS = {
    "name": "Name",
    "state": "State",
    "cpu": "CPU %",
    "guarantee": "Guarantee %",
    "cap": "Cap %",
    "share": "Share",
    "memory": "Memory MiB",
    "memory_limit": "Limit MiB",
    "pids": "Pids",
    "tx": "Sent bit/s",
    "rx": "Recv bit/s",
    "disk": "Disk MiB",
    "sessions": "SSH",
    "loans": "Loans",
}
WAIT = 60.0
#: Fault: no such sliver, or an invalid name.
BAD_ARGUMENT = 102


def default_url() -> str:
    run = "/run/nodepool"
    if not os.path.exists(f"{run}/nodemanager.api") and os.geteuid() != 0:
        home = os.path.expanduser("~/.local/state/nodepool-nodemanager")
        run = os.path.join(os.environ.get("XDG_RUNTIME_DIR") or home, "nodepool")
    return f"unix:{run}/nodemanager.api"


def create_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROG, description="Inspect and manage the slivers of a node manager."
    )
    parser.add_argument(
        "--version", action="version", version=f"Nodepool version: {get_version_string()}"
    )
    parser.add_argument(
        "--url",
        default=os.environ.get("NODEPOOL_NM_URL") or default_url(),
        help="unix:/path, http://127.0.0.1:812 or https://host:8120 (default: %(default)s)",
    )
    for name in ("ca", "cert", "key"):
        parser.add_argument(f"--{name}", type=absolute_path, metavar="FILE", help="for https")
    parser.add_argument("--debug", action="store_true", help="print tracebacks of errors")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def command(
        name: str,
        function: Callable[[Client, argparse.Namespace], Any],
        text: str,
        sliver: bool = True,
    ) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(function=function)
        if sliver:
            sub.add_argument("sliver", metavar="SLIVER")
        return sub

    listing = command("list", list_slivers, "list slivers", False)
    listing.add_argument("--format", choices=status.FORMATS, default="table")
    command(
        "show",
        lambda client, args: _print(client.call("GetRecord", args.sliver)),
        "show all properties of a sliver",
    )
    create = command(
        "create",
        create_sliver,
        "create a sliver; without options, create one whose record its authority has sent with "
        "plc_instantiated off",
    )
    create.add_argument("--image", help="host, dir:/path, tar:/path, image:NAME or oci:REFERENCE")
    create.add_argument(
        "--key",
        metavar="FILE",
        type=absolute_path,
        dest="ssh_key",
        help="file with public keys that may log in",
    )
    create.add_argument("--network", help="none, nat or bridge:INTERFACE")
    create.add_argument(
        "--lease",
        type=whole_number(1),
        metavar="SECONDS",
        help="time after which it is deleted automatically",
    )
    create.add_argument(
        "--rspec",
        nargs="+",
        default=[],
        dest="resources",
        metavar="RESOURCE=AMOUNT",
        help="for example nm_mem_limit=512",
    )
    for name, method, text in (
        ("delete", "DeleteSliver", "remove a sliver"),
        ("start", "Start", "start a sliver"),
        ("stop", "Stop", "end all processes of a sliver"),
        ("recreate", "ReCreate", "stop and start a sliver"),
    ):
        sub = command(name, act, text)
        sub.set_defaults(method=method)
    command("console", show_console, "print the console output of a sliver")
    lend = command("loans", show_or_set_loans, "show the loans of a sliver, or replace all of them")
    lend.add_argument(
        "loans", nargs="*", metavar="RECIPIENT:RESOURCE:AMOUNT", help="'none' for no loans"
    )
    command(
        "capacity",
        lambda client, args: _print(client.call("GetCapacity")),
        "print the capacity of the node: memory in MiB, disk in KiB, CPU in per mille of the host",
        False,
    )
    command(
        "dump",
        lambda client, args: print(client.call("DumpDatabase")),
        "print the whole database (root only)",
        False,
    )
    old = command(
        "import-pickle",
        import_database,
        "import the database of the original node manager; ours must not be running",
        False,
    )
    old.add_argument(
        "file", type=absolute_path, metavar="FILE", help="such as /root/pl_node_mgr_db.pickle"
    )
    old.add_argument(
        "--database",
        type=absolute_path,
        default="/var/lib/nodepool/nodemanager/nodemanager.sqlite",
        metavar="FILE",
    )
    command(
        "help",
        lambda client, args: print(client.call("Help"), end=""),
        "list the methods of the API",
        False,
    )
    top = command("top", show_top, "show a live table of slivers", False)
    top.add_argument("--interval", type=seconds, default=2.0, metavar="SECONDS")
    top.add_argument("--once", action="store_true", help="print one table and exit")
    _ticket(commands)
    return parser


def _ticket(commands: Any) -> None:
    ticket = commands.add_parser("ticket", help="sign, verify or submit tickets")
    actions = ticket.add_subparsers(dest="action", metavar="ACTION", required=True)
    sign = actions.add_parser("sign", help="sign the records of a JSON file")
    sign.add_argument("records", type=absolute_path, metavar="FILE")
    sign.set_defaults(function=sign_ticket)
    sign.add_argument(
        "--key-file",
        type=absolute_path,
        required=True,
        metavar="PEM",
        help="private key (Ed25519 or P-256)",
    )
    sign.add_argument("--issuer", required=True)
    sign.add_argument("--host", required=True, help="name of the node that the ticket is for")
    sign.add_argument("--lifetime", type=whole_number(1), default=3600, metavar="SECONDS")
    sign.add_argument(
        "--xml",
        type=absolute_path,
        metavar="CERTIFICATE",
        help="create the XML form, with the key's certificate",
    )
    verify = actions.add_parser(
        "verify", help="check a ticket without submitting it, and show its records"
    )
    verify.add_argument("ticket", type=absolute_path, metavar="FILE")
    verify.add_argument(
        "--public-key",
        type=absolute_path,
        required=True,
        metavar="PEM",
        help="public key, or certificate",
    )
    verify.add_argument("--host", required=True, help="name of the node that the ticket is for")
    verify.set_defaults(function=verify_ticket)
    use = actions.add_parser("use", help="submit a ticket")
    use.add_argument("ticket", type=absolute_path, metavar="FILE")
    use.set_defaults(function=use_ticket)


def _print(value: object) -> None:
    print(json.dumps(value, indent=1, sort_keys=True))


def _percent(per_mille: int) -> str:
    return f"{per_mille / 10:g}" if per_mille else "-"


def list_slivers(client: Client, args: argparse.Namespace) -> None:
    rows = []
    for sliver in client.call("ListSlivers"):
        effective = sliver.get("effective") or {}
        rows.append(
            {
                "name": sliver["name"],
                "state": sliver["state"],
                "image": sliver["image"],
                "ssh": f"{sliver['ssh_address']}:{sliver['ssh_port']}",
                "guarantee": _percent(effective.get("nm_cpu_guaranteed_share", 0)),
                "memory": effective.get("nm_mem_limit") or "-",
                "error": sliver["error"] or "",
                # Who delivered its record; "driver" means launchers and this program.
                "source": "API call"
                if sliver["source"] == "driver" and args.format == "table"
                else sliver["source"],
                "expires": time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(sliver["expiry"]))
                if sliver["expiry"]
                else "never",
            }
        )
    print(status.output(status.Results(rows, LIST_COLUMNS), args.format))


def show_console(client: Client, args: argparse.Namespace) -> None:
    text = client.call("GetConsole", args.sliver)
    # A terminal would interpret control characters; a file gets the text unchanged.
    print("\n".join(map(clean, text.split("\n"))) if sys.stdout.isatty() else text, end="")


def create_sliver(client: Client, args: argparse.Namespace) -> int:
    given = {"image": args.image, "network": args.network}
    rspec = {}
    for item in args.resources:
        name, equals, amount = item.partition("=")
        if not equals:
            raise SystemExit(f"{PROG}: error: {item!r} is not RESOURCE=AMOUNT")
        rspec[name] = amount
    if any(given.values()) or rspec or args.ssh_key or args.lease:
        record: dict[str, Any] = {
            "account_type": "sliver",
            "name": args.sliver,
            "rspec": rspec,
            **{key: value for key, value in given.items() if value},
        }
        if args.ssh_key:
            record["ssh_keys"] = pathlib.Path(args.ssh_key).read_text("utf-8")
        if args.lease:
            record["expiry"] = int(time.time()) + args.lease
        client.call("PutRecord", record)
    else:
        try:
            client.call("CreateSliver", args.sliver)
        except RpcFault as fault:
            if fault.code == BAD_ARGUMENT:
                raise RpcFault(
                    fault.code,
                    f"{fault.text}; to create a new one, specify options such as --image host",
                ) from None
            raise
    found = client.call("WaitSliver", args.sliver, "ready", WAIT, timeout=WAIT + 10)
    if found.get("state") != "ready":
        print(
            f"{PROG}: error: {args.sliver} is {found.get('state')}: "
            f"{found.get('error') or 'no reason known'}; "
            f"it is kept for inspection (`{PROG} console {args.sliver}`) until `{PROG} delete "
            f"{args.sliver}`",
            file=sys.stderr,
        )
        return 1
    print(
        f"{found['name']} is ready: ssh -p {found['ssh_port']} "
        f"{found['username']}@{found['ssh_address']}"
    )
    return 0


def act(client: Client, args: argparse.Namespace) -> None:
    client.call(args.method, args.sliver, timeout=WAIT)


def show_or_set_loans(client: Client, args: argparse.Namespace) -> None:
    if args.loans:
        loans: list[list[Any]] = []
        for text in args.loans:
            if text == "none":
                continue
            parts = text.split(":")
            if len(parts) != 3 or not parts[2].isdigit():
                raise SystemExit(f"{PROG}: error: {text!r} is not RECIPIENT:RESOURCE:AMOUNT")
            loans.append([parts[0], parts[1], int(parts[2])])
        client.call("SetLoans", args.sliver, loans)
    for recipient, resource, amount in client.call("GetLoans", args.sliver):
        print(f"{recipient}:{resource}:{amount}")


def sign_ticket(client: Client, args: argparse.Namespace) -> None:
    from nodepool.nodemanager.sources import tickets

    given = json.loads(pathlib.Path(args.records).read_text("utf-8"))
    records = given if isinstance(given, list) else [given]
    key = pathlib.Path(args.key_file).read_bytes()
    if args.xml:
        certificate = pathlib.Path(args.xml).read_bytes()
        print(tickets.sign_xml(records, key, certificate, args.issuer, args.host, args.lifetime))
    else:
        print(tickets.sign(records, key, args.issuer, args.host, args.lifetime))


def verify_ticket(client: Client, args: argparse.Namespace) -> None:
    from nodepool.nodemanager.sources import tickets

    signed = pathlib.Path(args.ticket).read_text("utf-8")
    keys = "xml-keys" if signed.lstrip().startswith("<") else "keys"
    _print(tickets.verify(signed, {keys: [args.public_key]}, args.host).slivers)


def import_database(client: Client, args: argparse.Namespace) -> None:
    """Import a database offline: the node manager must not be running."""
    from nodepool.nodemanager.records.database import Database
    from nodepool.nodemanager.records.pickle_import import import_pickle

    database = Database(args.database)
    database.open()
    try:
        print(import_pickle(database, args.file))
    finally:
        database.close()


def use_ticket(client: Client, args: argparse.Namespace) -> None:
    for name in client.call("Ticket", pathlib.Path(args.ticket).read_text("utf-8")):
        print(name)


class Top:
    """Rows of the live table; rates are computed from two samples."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._before: dict[str, tuple[float, dict[str, int]]] = {}

    def rows(self) -> list[dict[str, Any]]:
        cores = self._client.call("GetCapacity")["cores"]
        rows = []
        for sliver in self._client.call("ListSlivers"):
            name, effective = sliver["name"], sliver.get("effective") or {}
            try:
                usage = self._client.call("GetUsage", name) if sliver["state"] == "ready" else {}
                loans = len(self._client.call("GetLoans", name))
            except RpcFault:  # deleted in the meantime
                continue
            now = time.monotonic()
            then, before = self._before.get(name, (now, usage))
            self._before[name] = now, usage
            keys = ("cpu_usec", "net_tx_bytes", "net_rx_bytes")
            rates = {
                key: max(0.0, usage.get(key, 0) - before.get(key, 0)) / max(now - then, 0.001)
                for key in keys
            }
            rows.append(
                {
                    "name": name,
                    "state": sliver["state"],
                    "cpu": f"{rates['cpu_usec'] / 1e4 / cores:.1f}",
                    "guarantee": _percent(effective.get("nm_cpu_guaranteed_share", 0)),
                    "cap": _percent(effective.get("nm_cpu_limit", 0)),
                    "share": effective.get("nm_cpu_share", ""),
                    "memory": _mib(usage.get("memory_bytes")),
                    "memory_limit": effective.get("nm_mem_limit") or "-",
                    "pids": usage.get("pids", ""),
                    "tx": _bits(rates["net_tx_bytes"]),
                    "rx": _bits(rates["net_rx_bytes"]),
                    "disk": _mib(usage.get("disk_bytes")),
                    "sessions": sliver.get("sessions", 0),
                    "loans": loans or "-",
                }
            )
        return rows


def _mib(value: int | None) -> str:
    return "" if value is None else f"{value / 2**20:.1f}"


def _bits(bytes_per_second: float) -> str:
    value = bytes_per_second * 8
    for unit in ("", "k", "M"):
        if value < 1000:
            return f"{value:.0f}{unit}"
        value /= 1000
    return f"{value:.0f}G"


def show_top(client: Client, args: argparse.Namespace) -> None:
    top = Top(client)
    top.rows()

    def draw() -> None:
        if sys.stdout.isatty():
            print(client.url)
        print(status.output(status.Results(top.rows(), TOP_COLUMNS), "table"))

    # Show the first rates soon.
    pause = min(args.interval, 0.5)
    if args.once:
        time.sleep(pause)
        draw()
        return
    never = Changes()
    with screen() as shown:
        while shown.wait(never, pause, pause):
            shown.show(draw)
            pause = args.interval


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status.

    Exceptions are passed to the caller.
    """
    args = create_parser().parse_args(arguments(argv))
    tls = Tls(args.ca, args.cert, args.key) if args.ca and args.cert and args.key else None
    return args.function(Client(args.url, tls), args) or 0


def console() -> int:
    """Run the console script: errors in one line (and tracebacks with ``--debug``)."""
    return run_console(PROG, main, "--debug" in sys.argv)


if __name__ == "__main__":
    sys.exit(console())
