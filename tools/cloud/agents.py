"""Stand in for neutron's agents, because the fake hypervisor plugs nothing.

Usage: agents.py NEUTRON_CONF [DELAY]. Reports a living L2 and L3 agent over neutron's RPC, and
answers new ports and floating IPs with "up" after DELAY seconds.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

import oslo_messaging
from neutron.agent import rpc as agent_rpc
from neutron.agent.l3 import agent as l3_agent
from neutron.common import config
from neutron.conf.agent import common as agent_options
from neutron_lib import constants, context
from neutron_lib import rpc as lib_rpc
from neutron_lib.agent import topics
from oslo_config import cfg
from oslo_utils import timeutils

HOST = "compute1"
REPORT = 20.0
REPORT_TIMEOUT = 3.0
AGENT = "ovs-agent-compute1"


class Ports:
    """Sets ports of servers to "up"."""

    target = oslo_messaging.Target(version="1.5")

    def __init__(self, plugin: agent_rpc.PluginApi, delay: float) -> None:
        self.plugin = plugin
        self.delay = delay
        self.seen: set[str] = set()

    def port_update(self, _context: Any, port: dict[str, Any], **_kwargs: Any) -> None:
        if (
            port.get("binding:host_id") == HOST
            and port.get("status") != "ACTIVE"
            and port["id"] not in self.seen
        ):
            self.seen.add(port["id"])
            threading.Timer(self.delay, self.up, (port["id"],)).start()

    def up(self, port: str) -> None:
        self.seen.discard(port)
        self.plugin.update_device_list(
            context.get_admin_context_without_session(), [port], [], AGENT, HOST
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *_args, **_kwargs: None


class Routers:
    """Sets floating IPs to ACTIVE."""

    target = oslo_messaging.Target(version="1.5")

    def __init__(self, plugin: l3_agent.L3PluginApi, delay: float) -> None:
        self.plugin = plugin
        self.delay = delay

    def routers_updated(self, _context: Any, routers: list[Any], **_kwargs: Any) -> None:
        threading.Timer(
            self.delay,
            self.up,
            ([item if isinstance(item, str) else item["id"] for item in routers],),
        ).start()

    def up(self, routers: list[str]) -> None:
        admin = context.get_admin_context_without_session()
        for router in self.plugin.get_routers(admin, routers) or []:
            states = {
                fip["id"]: "ACTIVE" if fip.get("port_id") else "DOWN"
                for fip in router.get("_floatingips", [])
            }
            self.plugin.update_floatingip_statuses(admin, router["id"], states)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *_args, **_kwargs: None


def report(states: list[tuple[agent_rpc.PluginReportStateAPI, dict[str, Any]]]) -> None:
    for api, state in states:
        api.timeout = REPORT_TIMEOUT  # what was sent before the server listened is lost
        api.report_state(context.get_admin_context_without_session(), state, use_call=True)
        state.pop("start_flag", None)


def main() -> None:
    delay = float(sys.argv[2]) if len(sys.argv) > 2 else 0.3
    agent_options.register_agent_state_opts_helper(cfg.CONF)
    config.register_common_config_options()
    config.init(["--config-file", sys.argv[1]])
    config.setup_logging()
    l2 = {
        "agent_type": constants.AGENT_TYPE_OVS,
        "binary": "neutron-openvswitch-agent",
        "host": HOST,
        "topic": constants.L2_AGENT_TOPIC,
        "start_flag": True,
        "agent_id": AGENT,
        "configurations": {
            "tunnel_types": ["vxlan"],
            "tunneling_ip": "127.0.0.1",
            "bridge_mappings": {"external": "br-ex"},
            "datapath_type": "system",
            "ovs_hybrid_plug": False,
            "vhostuser_socket_dir": "/var/run/openvswitch",
        },
    }
    l3 = {
        "agent_type": constants.AGENT_TYPE_L3,
        "binary": "neutron-l3-agent",
        "host": HOST,
        "topic": topics.L3_AGENT,
        "start_flag": True,
        "configurations": {
            "agent_mode": "legacy",
            "handle_internal_only_routers": True,
            "interface_driver": "openvswitch",
            "log_agent_heartbeats": False,
        },
    }
    states = [(agent_rpc.PluginReportStateAPI(topics.REPORTS), state) for state in (l2, l3)]
    ports = Ports(agent_rpc.PluginApi(topics.PLUGIN), delay)
    agent_rpc.create_consumers(
        [ports],
        topics.AGENT,
        [
            [topics.PORT, topics.UPDATE],
            [topics.PORT, topics.DELETE],
            [topics.NETWORK, topics.UPDATE],
            [topics.NETWORK, topics.DELETE],
        ],
    )
    connection = lib_rpc.Connection()
    routers = Routers(l3_agent.L3PluginApi(topics.L3PLUGIN, HOST), delay)
    connection.create_consumer(f"{topics.L3_AGENT}.{HOST}", [routers], fanout=False)
    connection.create_consumer(topics.L3_AGENT, [routers], fanout=False)
    connection.create_consumer(topics.L3_AGENT, [routers], fanout=True)
    connection.consume_in_threads()
    pause = threading.Event()
    while True:
        try:
            report(states)
            wait = REPORT
        except oslo_messaging.MessagingException as error:
            print(f"{timeutils.utcnow()} cannot report: {error}", file=sys.stderr, flush=True)
            wait = 1.0
        pause.wait(wait)


if __name__ == "__main__":
    main()
