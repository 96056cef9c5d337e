"""Configuration files of the services of tools/openstack."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
from typing import Any

PROJECTS = ("keystone", "glance", "openstack-placement", "nova", "neutron", "cinder")
REGION = "RegionOne"
DATABASES = (
    "keystone",
    "glance",
    "placement",
    "nova",
    "nova_api",
    "nova_cell0",
    "neutron",
    "cinder",
)

WSGI = {
    "keystone": "keystone.wsgi.api",
    "glance": "glance.wsgi.api",
    "placement": "placement.wsgi.api",
    "nova": "nova.wsgi.osapi_compute",
    "neutron": "neutron.wsgi.api",
    "cinder": "cinder.wsgi.api",
}
FILES = {
    "keystone": "keystone.conf",
    "glance": "glance-api.conf",
    "placement": "placement.conf",
    "nova": "api-paste.ini;nova.conf",
    "neutron": "neutron.conf;ml2.ini",
    "cinder": "cinder.conf",
}

#: Commands that make the databases.
SYNC: dict[str, tuple[tuple[str, ...], ...]] = {
    "keystone": (
        ("keystone-manage", "--config-dir", "{conf}", "db_sync"),
        (
            "keystone-manage",
            "--config-dir",
            "{conf}",
            "fernet_setup",
            "--keystone-user",
            "root",
            "--keystone-group",
            "root",
        ),
        (
            "keystone-manage",
            "--config-dir",
            "{conf}",
            "credential_setup",
            "--keystone-user",
            "root",
            "--keystone-group",
            "root",
        ),
    ),
    "glance": (("glance-manage", "--config-dir", "{conf}", "db_sync"),),
    "placement": (("placement-manage", "--config-dir", "{conf}", "db", "sync"),),
    "nova": (
        ("nova-manage", "--config-dir", "{conf}", "api_db", "sync"),
        ("nova-manage", "--config-dir", "{conf}", "cell_v2", "map_cell0"),
        ("nova-manage", "--config-dir", "{conf}", "cell_v2", "create_cell", "--name", "cell1"),
        ("nova-manage", "--config-dir", "{conf}", "db", "sync"),
    ),
    "neutron": (
        (
            "neutron-db-manage",
            "--config-file",
            "{conf}/neutron.conf",
            "--config-file",
            "{conf}/ml2.ini",
            "upgrade",
            "heads",
        ),
    ),
    "cinder": (("cinder-manage", "--config-dir", "{conf}", "db", "sync"),),
}

Section = dict[str, Any]


def write(directory: pathlib.Path, venv: pathlib.Path, values: dict[str, Any]) -> None:
    """Write all configuration files below the directory.

    They contain passwords, so only the owner can read them.

    """
    ports, password = values["ports"], values["password"]
    conf = directory / "conf"
    keystone = f"http://127.0.0.1:{ports['keystone']}/v3"
    service: Section = {
        "auth_type": "password",
        "auth_url": keystone,
        "username": "admin",
        "password": password,
        "project_name": "admin",
        "user_domain_name": "Default",
        "project_domain_name": "Default",
        "region_name": REGION,
    }
    token: Section = {
        **service,
        "www_authenticate_uri": keystone,
        "service_token_roles_required": "false",
        "interface": "public",
        "service_type": "any",
    }

    def database(name: str) -> Section:
        return {
            "connection": f"mysql+pymysql://os:{password}@localhost/{name}?unix_socket={directory}/"
            "mysql.sock",
            "max_pool_size": 10,
            "max_overflow": 20,
        }

    default: Section = {
        "transport_url": f"rabbit://guest:guest@127.0.0.1:{ports['amqp']}/",
        "debug": "false",
        "use_stderr": "true",
        "my_ip": "127.0.0.1",
        "host": "compute1",
        "state_path": directory / "state",
        "rpc_response_timeout": 60,
    }
    lock: Section = {"lock_path": directory / "locks"}
    common = {
        "oslo_concurrency": lock,
        "oslo_messaging_notifications": {"driver": "noop"},
        "oslo_messaging_rabbit": {"rabbit_quorum_queue": "false", "heartbeat_in_pthread": "false"},
        "oslo_policy": {"enforce_scope": "false"},
    }
    files: dict[str, dict[str, Section]] = {
        "keystone/keystone.conf": {
            "DEFAULT": {"use_stderr": "true", "max_token_size": 400},
            "database": database("keystone"),
            "token": {"provider": "fernet", "expiration": 14400},
            "fernet_tokens": {"key_repository": conf / "keystone/fernet"},
            "credential": {"key_repository": conf / "keystone/credential"},
            "security_compliance": {},
            "identity": {"password_hash_rounds": 4},
        },
        "glance/glance-api.conf": {
            "DEFAULT": {
                "use_stderr": "true",
                "enabled_backends": "fs:file",
                "enabled_import_methods": "[glance-direct]",
                "worker_self_reference_url": f"http://127.0.0.1:{ports['glance']}",
                "node_staging_uri": f"file://{directory}/staging",
                "transport_url": default["transport_url"],
                "workers": 0,
            },
            "database": database("glance"),
            "keystone_authtoken": token,
            "paste_deploy": {"flavor": "keystone"},
            "glance_store": {"default_backend": "fs"},
            "fs": {"filesystem_store_datadir": directory / "images"},
            "os_glance_staging_store": {"filesystem_store_datadir": directory / "staging"},
            "os_glance_tasks_store": {"filesystem_store_datadir": directory / "tasks"},
            # Tests upload files of any content.
            "image_format": {
                "disk_formats": "ami,ari,aki,vhd,vhdx,vmdk,raw,qcow2,vdi,iso",
                "require_image_format_match": "false",
            },
            "oslo_concurrency": lock,
            "oslo_policy": {"enforce_scope": "false"},
        },
        "placement/placement.conf": {
            "DEFAULT": {"use_stderr": "true"},
            "api": {"auth_strategy": "keystone"},
            "keystone_authtoken": token,
            "placement_database": database("placement"),
            "oslo_policy": {"enforce_scope": "false"},
        },
        "nova/nova.conf": {
            "DEFAULT": {
                **default,
                "compute_driver": "fake.FakeDriverWithoutFakeNodes",
                "instances_path": directory / "instances",
                "initial_cpu_allocation_ratio": 100,
                "initial_ram_allocation_ratio": 100,
                "initial_disk_allocation_ratio": 100,
                "vif_plugging_is_fatal": "false",
                "vif_plugging_timeout": 0,
                "max_concurrent_builds": 0,
                "reclaim_instance_interval": 0,
                "service_down_time": 600,
                "max_concurrent_snapshots": 0,
                "heal_instance_info_cache_interval": -1,
            },
            "api": {"auth_strategy": "keystone"},
            "api_database": database("nova_api"),
            "database": database("nova"),
            # Revoked tokens are refused immediately.
            "keystone_authtoken": {**token, "token_cache_time": -1},
            "placement": service,
            "neutron": {**service, "metadata_proxy_shared_secret": password},
            "glance": {**service, "endpoint_override": f"http://127.0.0.1:{ports['glance']}"},
            "cinder": {**service, "os_region_name": REGION},
            "service_user": {**service, "send_service_user_token": "true"},
            "scheduler": {"discover_hosts_in_cells_interval": 5, "workers": 1},
            "conductor": {"workers": 1},
            "vnc": {"enabled": "false"},
            "quota": {"count_usage_from_placement": "false", "recheck_quota": "true"},
            "filter_scheduler": {"available_filters": "nova.scheduler.filters.all_filters"},
            "workarounds": {"skip_cpu_compare_on_dest": "true"},
            "key_manager": {},
            **common,
        },
        "neutron/neutron.conf": {
            "DEFAULT": {
                **default,
                "core_plugin": "ml2",
                "service_plugins": "router,trunk",
                "auth_strategy": "keystone",
                "notify_nova_on_port_status_changes": "true",
                "notify_nova_on_port_data_changes": "true",
                "api_workers": 1,
                "rpc_workers": 1,
                "rpc_state_report_workers": 1,
                "agent_down_time": 600,
                "dhcp_agent_notification": "false",
                "allow_overlapping_ips": "true",
                "api_paste_config": conf / "neutron/api-paste.ini",
            },
            "database": database("neutron"),
            "keystone_authtoken": token,
            "nova": service,
            "placement": service,
            **common,
        },
        "neutron/ml2.ini": {
            "ml2": {
                "type_drivers": "flat,vlan,vxlan,local",
                "tenant_network_types": "vxlan",
                "mechanism_drivers": "openvswitch",
                "extension_drivers": "port_security",
            },
            "ml2_type_flat": {"flat_networks": "external"},
            "ml2_type_vxlan": {"vni_ranges": "1:1000"},
            "securitygroup": {"enable_security_group": "true"},
        },
        "cinder/cinder.conf": {
            "DEFAULT": {
                **default,
                "enabled_backends": "memory",
                "auth_strategy": "keystone",
                "glance_api_servers": f"http://127.0.0.1:{ports['glance']}",
                "default_volume_type": "__DEFAULT__",
                "api_paste_config": conf / "cinder/api-paste.ini",
                "resource_query_filters_file": conf / "cinder/resource_filters.json",
            },
            "memory": {
                "volume_driver": "cloud.volumes.MemoryDriver",
                "volume_backend_name": "memory",
                "image_volume_cache_enabled": "false",
            },
            "database": database("cinder"),
            "keystone_authtoken": token,
            "nova": service,
            "service_user": {**service, "send_service_user_token": "true"},
            "coordination": {"backend_url": f"file://{directory}/locks"},
            **common,
        },
    }
    for name in ("images", "staging", "tasks", "instances", "state", "locks", "conf"):
        (directory / name).mkdir(mode=0o700, exist_ok=True)
    for name, sections in files.items():
        _write(conf / name, sections)
    for name in ("nova", "neutron", "cinder"):
        for source in (venv / "etc" / name).glob("*.*"):
            if source.is_file():
                shutil.copy(source, conf / name / source.name)
    shutil.copy(venv / "etc/glance/glance-api-paste.ini", conf / "glance/glance-api-paste.ini")
    _write_clouds(directory / "clouds.yaml", keystone, password)


def _write(path: pathlib.Path, sections: dict[str, Section]) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        for section, options in sections.items():
            file.write(
                f"[{section}]\n"
                + "".join(f"{key} = {value}\n" for key, value in options.items())
                + "\n"
            )


def _write_clouds(path: pathlib.Path, keystone: str, password: str) -> None:
    """Write clouds.yaml, in JSON, which is YAML."""

    def cloud(project: str, user: str) -> Section:
        return {
            "auth": {
                "auth_url": keystone,
                "username": user,
                "password": password,
                "project_name": project,
                "user_domain_name": "Default",
                "project_domain_name": "Default",
            },
            "region_name": REGION,
            "identity_api_version": 3,
            "networks": [
                {"name": "private", "default_interface": True},
                {"name": "external", "nat_source": True, "routes_externally": True},
            ]
            if project != "admin"
            else [],
        }

    clouds = {"admin": cloud("admin", "admin"), "test": cloud("nodepool", "nodepool")}
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        json.dump({"clouds": clouds}, file, indent=1)
