"""Metrics: for Prometheus and optionally for statsd (CLI-7).

All metrics of our own code are defined here, once each; external drivers may record any name.
"""

from __future__ import annotations

from nodepool.metrics.client import Metrics, Snapshot, shared, statsd_address
from nodepool.metrics.series import Definition, Series

__all__ = ["Definition", "Metrics", "Series", "Snapshot", "shared", "statsd_address"]

# State of the cluster, reported by the elected launcher.
NODES = Definition("nodepool.nodes.{state}", "nodepool_nodes", "Nodes by state")
PROVIDER_NODES = Definition(
    "nodepool.provider.{provider}.nodes.{state}",
    "nodepool_provider_nodes",
    "Nodes by provider and state",
)
LABEL_NODES = Definition(
    "nodepool.label.{label}.nodes.{state}", "nodepool_label_nodes", "Nodes by label and state"
)
ADDRESSABLE_REQUESTS = Definition(
    "nodepool.provider.{provider}.pool.{pool}.addressable_requests",
    "nodepool_pool_addressable_requests",
    "Requests whose labels the pool offers",
)

# Launches: a counter and a timer each.
LAUNCHES = Definition("nodepool.launch.{result}", "nodepool_launches", "Launch attempts by result")
PROVIDER_LAUNCHES = Definition(
    "nodepool.launch.provider.{provider}.{result}",
    "nodepool_provider_launches",
    "Launch attempts by provider and result",
)
ZONE_LAUNCHES = Definition(
    "nodepool.launch.provider.{provider}.{az}.{result}",
    "nodepool_zone_launches",
    "Launch attempts by provider, zone and result",
)
REQUESTOR_LAUNCHES = Definition(
    "nodepool.launch.requestor.{requestor}.{result}",
    "nodepool_requestor_launches",
    "Launch attempts by requestor and result",
)
LABEL_LAUNCHES = Definition(
    "nodepool.launch.label.{label}.{result}",
    "nodepool_label_launches",
    "Launch attempts by label and result",
)
TENANT_LAUNCHES = Definition(
    "nodepool.launch.tenant.{tenant}.{result}",
    "nodepool_tenant_launches",
    "Launch attempts by tenant and result",
)

# Seconds until requests were fulfilled: timers, by the launcher that fulfilled them; without those
# for min-ready.
REQUEST_WAIT = Definition(
    "nodepool.launcher.{host}.request_wait",
    "nodepool_request_wait",
    "Requests fulfilled, with the time since their creation",
)
LABEL_REQUEST_WAIT = Definition(
    "nodepool.label.{label}.request_wait",
    "nodepool_label_request_wait",
    "The same by label; a request counts once for each",
)
TENANT_REQUEST_WAIT = Definition(
    "nodepool.tenant.{tenant}.request_wait",
    "nodepool_tenant_request_wait",
    "The same by tenant, of those that have one",
)

REQUEST_STEP = Definition(
    "nodepool.launcher.{host}.request_step.{step}",
    "nodepool_request_step",
    "Parts of that: accept, until a pool took the request; serve, until it was fulfilled",
)
LAUNCH_STEP = Definition(
    "nodepool.provider.{provider}.launch_step.{step}",
    "nodepool_provider_launch_step",
    "Parts of a launch: create, until the machine runs; scan, until its host keys are known",
)

# Every launcher.
MAX_SERVERS = Definition(
    "nodepool.provider.{provider}.max_servers",
    "nodepool_provider_max_servers",
    "Limit of servers over the provider's pools",
)
TENANT_LIMIT = Definition(
    "nodepool.tenant_limits.{tenant}.{limit}",
    "nodepool_tenant_limit",
    "Resource limit of the tenant",
)
LEAKED = Definition(
    "nodepool.provider.{provider}.leaked.{kind}",
    "nodepool_leaked_resources",
    "Leaked resources that were removed",
)
PROBES = Definition(
    "nodepool.provider.{provider}.probe.{result}",
    "nodepool_provider_probes",
    "Probes of idle nodes by result, and nodes that were replaced",
)
NODE_CPU = Definition(
    "nodepool.label.{label}.provider.{provider}.cpu_seconds",
    "nodepool_node_cpu_seconds",
    "CPU time that ended nodes have used, as their node managers report",
)
NODE_MEMORY = Definition(
    "nodepool.label.{label}.provider.{provider}.memory_peak.{share}",
    "nodepool_node_memory_peak",
    "Ended nodes by the highest use of memory, as a share of the limit: at most 0.25, 0.5, ...",
)
NODE_KILLS = Definition(
    "nodepool.label.{label}.provider.{provider}.memory_kills",
    "nodepool_node_memory_kills",
    "Processes of ended nodes that were killed because the memory limit was reached",
)
API_CALLS = Definition(
    "nodepool.provider.{provider}.api.{operation}",
    "nodepool_provider_api",
    "Calls of the provider's API, failed ones included",
)
API_ERRORS = Definition(
    "nodepool.provider.{provider}.api.{operation}.error.{kind}",
    "nodepool_provider_api_errors",
    "Failed calls of the provider's API by type of error",
)
LAUNCHER_CONFIG_STALE = Definition(
    "nodepool.launcher.config_stale",
    "nodepool_launcher_config_stale",
    "1 while the configuration file cannot be used",
)
ZOOKEEPER_QUEUE = Definition(
    "nodepool.launcher.{host}.zk.{queue}",
    "nodepool_zookeeper_queue",
    "Length of a queue between ZooKeeper and this launcher",
)
MIRROR_LAG = Definition(
    "nodepool.launcher.{host}.zk.mirror_lag",
    "nodepool_zookeeper_mirror_lag",
    "Delay of the mirror behind ZooKeeper, measured by a request whose answer follows the pending "
    "events",
)
REQUESTS_WAITING = Definition(
    "nodepool.launcher.{host}.requests_waiting",
    "nodepool_launcher_requests_waiting",
    "Requests that wait for a pool of this launcher",
)
REQUESTS_WAITING_FOR = Definition(
    "nodepool.launcher.{host}.waiting_for.{reason}",
    "nodepool_launcher_requests_waiting_for",
    "Requests that wait, by reason; those with several count for each",
)
REQUESTS_DECLINED = Definition(
    "nodepool.launcher.{host}.declined.{reason}",
    "nodepool_launcher_requests_declined",
    "Requests that a pool of this launcher has declined, by reason; those with several count for "
    "each",
)

# Builds and uploads.
IMAGE_EXIT_STATUS = Definition(
    "nodepool.dib_image_build.{image}.status.rc",
    "nodepool_image_build_exit_status",
    "Exit status of the last build",
)
IMAGE_LAST_BUILD = Definition(
    "nodepool.dib_image_build.{image}.status.last_build",
    "nodepool_image_last_build_timestamp",
    "UNIX time of the last build",
)
IMAGE_BUILD = Definition(
    "nodepool.dib_image_build.{image}.status.duration",
    "nodepool_image_build",
    "Builds of the image",
)
IMAGE_SIZE = Definition(
    "nodepool.dib_image_build.{image}.{format}.size",
    "nodepool_image_size_bytes",
    "Disk usage of the built image",
)
IMAGE_UPLOADS = Definition(
    "nodepool.image_update.{image}.{provider}", "nodepool_image_uploads", "Finished image uploads"
)
BUILD_REQUESTS = Definition(
    "nodepool.image_build_requests",
    "nodepool_image_build_requests",
    "Images with a pending build request",
)
BUILD_REQUESTED = Definition(
    "nodepool.image.{image}.image_build_requests",
    "nodepool_image_build_requested",
    "1 when a build of the image is requested",
)

# Every builder.
BUILD_STATE = Definition(
    "nodepool.builder.{host}.image.{image}.build.state",
    "nodepool_builder_build_state",
    "0 idle, 1 building, 3 paused",
)
BUILD_PHASE = Definition(
    "nodepool.builder.{host}.image.{image}.build.phase",
    "nodepool_builder_build_phase",
    "Phase of the running build, 0 when none runs",
)
BUILD_PHASE_TIME = Definition(
    "nodepool.dib_image_build.{image}.phase.{phase}",
    "nodepool_image_build_phase",
    "Phases of builds of the image",
)
BUILD_ELAPSED = Definition(
    "nodepool.builder.{host}.image.{image}.build.elapsed",
    "nodepool_builder_build_elapsed_seconds",
    "Time that the running build has taken",
)
BUILD_EXPECTED = Definition(
    "nodepool.builder.{host}.image.{image}.build.expected",
    "nodepool_builder_build_expected_seconds",
    "Time that earlier builds of the image took; 0: not known",
)
UPLOAD_STATE = Definition(
    "nodepool.builder.{host}.image.{image}.provider.{provider}.upload.state",
    "nodepool_builder_upload_state",
    "0 idle, 2 uploading, 3 paused",
)
BUILDER_CONFIG_STALE = Definition(
    "nodepool.builder.{host}.config_stale",
    "nodepool_builder_config_stale",
    "1 while the configuration file cannot be used",
)
CURRENT_BUILDS = Definition(
    "nodepool.builder.{host}.current_builds", "nodepool_builder_current_builds", "Running builds"
)
CURRENT_UPLOADS = Definition(
    "nodepool.builder.{host}.current_uploads", "nodepool_builder_current_uploads", "Running uploads"
)
BUILD_WORKERS = Definition(
    "nodepool.builder.{host}.build_workers", "nodepool_builder_build_workers", "Build workers"
)
UPLOAD_WORKERS = Definition(
    "nodepool.builder.{host}.upload_workers", "nodepool_builder_upload_workers", "Upload workers"
)
