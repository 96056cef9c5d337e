"""Amazon for tests: a moto process, a fault proxy in front of it, and an imitation of the little
that moto lacks.
"""

from __future__ import annotations

import atexit
import itertools
import json
import os
import re
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.fault_proxy import FaultProxy, Forward, Reply, Request

REGION = "us-east-1"
_process: dict[str, Any] = {}
_XML = 'xmlns="http://ec2.amazonaws.com/doc/2016-11-15/"'


def moto_port() -> int:
    """Port of the moto server of this test process; started once."""
    if not _process:
        environment = {
            **os.environ,
            "MOTO_EC2_LOAD_DEFAULT_AMIS": "false",
            "PYTHONWARNINGS": "ignore",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
        }
        process = subprocess.Popen(
            [sys.executable, os.path.join(os.path.dirname(__file__), "moto_process.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            text=True,
        )
        assert process.stdout is not None
        _process.update(process=process, port=int(process.stdout.readline()))

        def stop() -> None:
            process.kill()
            process.wait(10)

        atexit.register(stop)
    return int(_process["port"])


class LookAlike:
    """Quotas, imports, tokens, snapshots of registered images: the operations that moto does not
    have.
    """

    def __init__(self, ec2: Any) -> None:
        self.ec2 = ec2
        self.lock = threading.Lock()
        self.quotas: dict[str, dict[str, float]] = {"ec2": {}, "ebs": {}}
        #: Tasks by id: tags, what it made, how many looks until it is completed.
        self.tasks: dict[str, dict[str, Any]] = {}
        self.looks = 1
        self._numbers = itertools.count(1)
        self._tokens: dict[str, Reply] = {}
        self._snapshots: dict[bytes, bytes] = {}  # what is shown -> what moto has

    def __call__(self, request: Request, forward: Forward) -> Reply | None:
        handler = getattr(self, f"do_{request.operation}", None)
        answer: Reply | None = handler(request) if handler else None
        if answer is not None:
            return answer
        token = request.params.get("ClientToken")
        with self.lock:
            known = self._tokens.get(token) if token else None
        if known is not None:
            return Reply(known.status, known.body, known.headers)
        for shown, real in list(self._snapshots.items()):
            request.body = request.body.replace(shown, real)
        result = forward(request)
        if token and result.status == 200:
            with self.lock:
                self._tokens[token] = Reply(result.status, result.body, result.headers)
        if request.method == "GET" and b"<ListMultipartUploadsResult" in result.body:
            # moto's uploads began in 2010, all of them.
            now = time.strftime("<Initiated>%Y-%m-%dT%H:%M:%S.000Z", time.gmtime()).encode()
            result.body = re.sub(rb"<Initiated>[^<]*", now, result.body)
        if request.operation == "DescribeHosts":
            self._show_instances(result)
        if request.operation == "RegisterImage" and result.status == 200:
            self._note_image(request, result)
        for shown, real in list(self._snapshots.items()):
            result.body = result.body.replace(real, shown)
        return result

    @staticmethod
    def _xml(name: str, inner: str) -> Reply:
        body = (
            f'<?xml version="1.0" encoding="UTF-8"?><{name}Response '
            f"{_XML}><requestId>r</requestId>{inner}</{name}Response>"
        )
        return Reply(200, body.encode(), [("Content-Type", "text/xml")])

    def _error(self, code: str) -> Reply:
        return Reply(
            400,
            (
                f"<Response><Errors><Error><Code>{code}</Code><Message>made "
                "up</Message></Error></Errors>"
                "<RequestID>r</RequestID></Response>"
            ).encode(),
            [("Content-Type", "text/xml")],
        )

    def do_ListServiceQuotas(self, request: Request) -> Reply:
        service = json.loads(request.body)["ServiceCode"]
        quotas = [
            {"QuotaCode": code, "Value": value} for code, value in self.quotas[service].items()
        ]
        # Two pages, as with the real thing.
        page = json.loads(request.body).get("NextToken")
        half = len(quotas) // 2
        answer = (
            {"Quotas": quotas[half:]} if page else {"Quotas": quotas[:half], "NextToken": "more"}
        )
        return Reply(
            200, json.dumps(answer).encode(), [("Content-Type", "application/x-amz-json-1.1")]
        )

    # -- moto deletes what others use (findings/moto-deletes-snapshot-of-registered-image.sh)

    def do_DeleteSnapshot(self, request: Request) -> Reply | None:
        shown = request.params["SnapshotId"].encode()
        wanted = self._snapshots.get(shown, shown).decode()
        disks = (
            disk
            for image in self.ec2.describe_images(Owners=["self"])["Images"]
            for disk in image["BlockDeviceMappings"]
        )
        if any(disk.get("Ebs", {}).get("SnapshotId") == wanted for disk in disks):
            return self._error("InvalidSnapshot.InUse")
        return None

    # -- moto does not care what runs on a host

    def _on_hosts(self) -> dict[str, list[str]]:
        """Instances by host."""
        found: dict[str, list[str]] = {}
        for reservation in self.ec2.describe_instances()["Reservations"]:
            for instance in reservation["Instances"]:
                if (host := instance["Placement"].get("HostId")) and instance["State"][
                    "Name"
                ] != "terminated":
                    found.setdefault(host, []).append(instance["InstanceId"])
        return found

    def _show_instances(self, result: Reply) -> None:
        for host, instances in self._on_hosts().items():
            items = "".join(f"<item><instanceId>{one}</instanceId></item>" for one in instances)
            shown = f"<hostId>{host}</hostId>"
            result.body = result.body.replace(
                shown.encode(), f"{shown}<instances>{items}</instances>".encode()
            )

    def do_ReleaseHosts(self, request: Request) -> Reply:
        """Refuses those that are occupied, in an answer that is not an error."""
        wanted = [value for key, value in request.params.items() if key.startswith("HostId.")]
        occupied = self._on_hosts()
        free = [host for host in wanted if host not in occupied]
        if free:
            self.ec2.release_hosts(HostIds=free)
        released = "".join(f"<item>{host}</item>" for host in free)
        refused = "".join(
            "<item><error><code>Client.InvalidHost.Occupied</code><message>occupied</message></"
            "error>"
            f"<resourceId>{host}</resourceId></item>"
            for host in wanted
            if host in occupied
        )
        return self._xml(
            "ReleaseHosts",
            f"<successful>{released}</successful><unsuccessful>{refused}</unsuccessful>",
        )

    # -- moto makes a separate snapshot for each image; it takes the place of the one that the
    # image was made of

    def _note_image(self, request: Request, result: Reply) -> None:
        given = request.params.get("BlockDeviceMapping.1.Ebs.SnapshotId")
        found = re.search(rb"<imageId>([^<]+)</imageId>", result.body)
        if given is None or found is None:
            return
        image = found.group(1).decode()
        self.put_in_place(image, given)
        tags = self.tags(request)
        if tags:  # moto drops them
            self.ec2.create_tags(
                Resources=[image], Tags=[{"Key": k, "Value": v} for k, v in tags.items()]
            )

    def put_in_place(self, image: str, given: str) -> None:
        images = self.ec2.describe_images(ImageIds=[image])["Images"]
        made = images[0]["BlockDeviceMappings"][0]["Ebs"]["SnapshotId"]
        tags = self.ec2.describe_snapshots(SnapshotIds=[given])["Snapshots"][0].get("Tags")
        if tags:
            self.ec2.create_tags(Resources=[made], Tags=tags)
        self.ec2.delete_snapshot(SnapshotId=given)
        with self.lock:
            self._snapshots[given.encode()] = made.encode()

    def real_snapshot(self, shown: str) -> str:
        """What moto calls it."""
        return self._snapshots.get(shown.encode(), shown.encode()).decode()

    # -- imports

    @staticmethod
    def tags(request: Request) -> dict[str, str]:
        params = request.params
        return {
            params[f"TagSpecification.1.Tag.{n}.Key"]: params[f"TagSpecification.1.Tag.{n}.Value"]
            for n in range(1, 60)
            if f"TagSpecification.1.Tag.{n}.Key" in params
        }

    def new_snapshot(self) -> str:
        volume = self.ec2.create_volume(AvailabilityZone=f"{REGION}a", Size=10)["VolumeId"]
        snapshot: str = self.ec2.create_snapshot(VolumeId=volume)["SnapshotId"]
        self.ec2.delete_volume(VolumeId=volume)
        return snapshot

    def new_task(self, kind: str, tags: dict[str, str], looks: int | None = None) -> str:
        """``kind``: snap or ami."""
        snapshot = self.new_snapshot()
        task = f"import-{kind}-{next(self._numbers):08x}"
        image = ""
        if kind == "ami":
            # Its name is all that links an imported image to its task.
            image = self.ec2.register_image(Name=task, Architecture="x86_64")["ImageId"]
            self.put_in_place(image, snapshot)
            with self.lock:
                self._snapshots[f"Created by AWS-VMImport service for {task}".encode()] = (
                    f"Auto-created snapshot for AMI {image}".encode()
                )
        with self.lock:
            self.tasks[task] = {
                "tags": tags,
                "snapshot": snapshot,
                "image": image,
                "looks": self.looks if looks is None else looks,
            }
        return task

    def do_ImportSnapshot(self, request: Request) -> Reply:
        task = self.new_task("snap", self.tags(request))
        return self._xml("ImportSnapshot", f"<importTaskId>{task}</importTaskId>")

    def do_ImportImage(self, request: Request) -> Reply:
        task = self.new_task("ami", self.tags(request))
        return self._xml("ImportImage", f"<importTaskId>{task}</importTaskId>")

    def _asked(self, request: Request, kind: str) -> list[tuple[str, dict[str, Any]]] | None:
        wanted = [
            value
            for key, value in request.params.items()
            if re.fullmatch(r"ImportTaskId\.\d+", key)
        ]
        with self.lock:
            if any(one not in self.tasks for one in wanted):
                return None
            found = [
                (key, task)
                for key, task in self.tasks.items()
                if key.startswith(f"import-{kind}-") and (not wanted or key in wanted)
            ]
            for _, task in found:
                task["looks"] -= 1
        return found

    @staticmethod
    def _tag_set(task: dict[str, Any]) -> str:
        items = "".join(
            f"<item><key>{key}</key><value>{value}</value></item>"
            for key, value in task["tags"].items()
        )
        return f"<tagSet>{items}</tagSet>"

    def do_DescribeImportSnapshotTasks(self, request: Request) -> Reply:
        asked = self._asked(request, "snap")
        if asked is None:
            return self._error("InvalidConversionTaskId.Malformed")
        items = ""
        for key, task in asked:
            done = task["looks"] < 0
            made = f"<snapshotId>{task['snapshot']}</snapshotId>" if done else ""
            items += (
                f"<item><importTaskId>{key}</importTaskId><snapshotTaskDetail>{made}"
                f"<status>{task.get('status') or ('completed' if done else 'active')}</status></"
                "snapshotTaskDetail>"
                f"{self._tag_set(task)}</item>"
            )
        return self._xml(
            "DescribeImportSnapshotTasks", f"<importSnapshotTaskSet>{items}</importSnapshotTaskSet>"
        )

    def do_DescribeImportImageTasks(self, request: Request) -> Reply:
        asked = self._asked(request, "ami")
        if asked is None:
            return self._error("InvalidConversionTaskId.Malformed")
        items = ""
        for key, task in asked:
            done = task["looks"] < 0
            made = (
                (
                    f"<imageId>{task['image']}</imageId><snapshotDetailSet><item><snapshotId>"
                    f"{task['snapshot']}"
                    "</snapshotId></item></snapshotDetailSet>"
                )
                if done
                else ""
            )
            items += (
                f"<item><importTaskId>{key}</importTaskId><status>"
                f"{'completed' if done else 'active'}</status>"
                f"{made}{self._tag_set(task)}</item>"
            )
        return self._xml(
            "DescribeImportImageTasks", f"<importImageTaskSet>{items}</importImageTaskSet>"
        )


class AwsCloud:
    """An empty account with a network, a security group, a key, an image and a bucket."""

    def __init__(self) -> None:
        import boto3

        self.port = moto_port()
        urllib.request.urlopen(
            urllib.request.Request(f"http://127.0.0.1:{self.port}/moto-api/reset", method="POST"),
            timeout=30,
        ).close()
        keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test"}
        self._direct = [
            boto3.client(
                name, region_name=REGION, endpoint_url=f"http://127.0.0.1:{self.port}", **keys
            )
            for name in ("ec2", "s3", "iam")
        ]
        self.ec2, self.s3, self.iam = self._direct
        self.like = LookAlike(self.ec2)
        self.like.quotas["ec2"] = {
            "L-1216C47A": 1000,
            "L-34B43A08": 1000,
            "L-43DA4232": 1000,
            "L-81657574": 100,
        }
        self.like.quotas["ebs"] = {
            "L-D18FCD1D": 50,
            "L-7A658B76": 50,
            "L-FD252861": 50,
            "L-B3A130E6": 100000,
        }
        self.proxy = FaultProxy(("127.0.0.1", self.port), self.like)
        vpc = self.ec2.create_vpc(CidrBlock="10.0.0.0/16")["Vpc"]["VpcId"]
        self.vpc = vpc
        self.subnet: str = self.new_subnet("10.0.1.0/24", "a")
        self.group: str = self.new_group("group")
        self.ec2.create_key_pair(KeyName="zuul")
        self.ami: str = self.ec2.register_image(
            Name="base", Architecture="x86_64", RootDeviceName="/dev/sda1", VirtualizationType="hvm"
        )["ImageId"]
        self.s3.create_bucket(Bucket="nodepool")

    def new_subnet(self, block: str, zone: str) -> str:
        subnet = self.ec2.create_subnet(
            VpcId=self.vpc, CidrBlock=block, AvailabilityZone=f"{REGION}{zone}"
        )
        return str(subnet["Subnet"]["SubnetId"])

    def new_group(self, name: str) -> str:
        return str(
            self.ec2.create_security_group(GroupName=name, Description=name, VpcId=self.vpc)[
                "GroupId"
            ]
        )

    def environment(self) -> dict[str, str]:
        """The standard means of AWS to find endpoint and credentials."""
        return {
            "AWS_ENDPOINT_URL": self.proxy.url,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "secret-of-test",
            "AWS_CONFIG_FILE": "/dev/null",
            "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def setup_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            monkeypatch.delenv(name)
        for name, value in self.environment().items():
            monkeypatch.setenv(name, value)

    # -- what is there

    def instances(self, *states: str) -> list[dict[str, Any]]:
        """In one of these states; by default those that are not on their way out."""
        wanted = states or ("pending", "running", "stopped", "stopping")
        return [
            instance
            for reservation in self.ec2.describe_instances()["Reservations"]
            for instance in reservation["Instances"]
            if instance["State"]["Name"] in wanted
        ]

    def hosts(self) -> list[dict[str, Any]]:
        return [host for host in self.ec2.describe_hosts()["Hosts"] if host["State"] != "released"]

    def snapshots(self) -> list[str]:
        base = self.ec2.describe_images(ImageIds=[self.ami])["Images"][0]["BlockDeviceMappings"][0][
            "Ebs"
        ]["SnapshotId"]
        return [
            one["SnapshotId"]
            for one in self.ec2.describe_snapshots(OwnerIds=["self"])["Snapshots"]
            if one["SnapshotId"] != base
        ]

    def images(self) -> list[dict[str, Any]]:
        return [
            one
            for one in self.ec2.describe_images(Owners=["self"])["Images"]
            if one["ImageId"] != self.ami
        ]

    def objects(self) -> list[str]:
        return [
            one["Key"] for one in self.s3.list_objects_v2(Bucket="nodepool").get("Contents") or []
        ]

    def close(self) -> None:
        self.proxy.close()
        for client in self._direct:
            client.close()

    # -- configuration

    def label(self, name: str = "small", /, **options: Any) -> dict[str, Any]:
        """An on-demand label of the image; ``_`` in names of options stands for ``-``."""
        values: dict[str, Any] = {"name": name, "key_name": "zuul", **options}
        if not {"cloud_image", "diskimage"} & set(options):
            values["cloud_image"] = "base"
        if not {"instance_type", "fleet"} & set(options):
            values["instance_type"] = "t3.medium"
        return dashed(values)

    def provider(
        self, *labels: dict[str, Any], pool: dict[str, Any] | None = None, **options: Any
    ) -> dict[str, Any]:
        pool_options = {
            "name": "main",
            "max-servers": 20,
            "subnet-id": self.subnet,
            "security-group-id": self.group,
            "host-key-checking": False,
            "labels": list(labels or [self.label()]),
            **(pool or {}),
        }
        return {
            "name": "ec2-us",
            "driver": "aws",
            "region-name": REGION,
            "rate": 100,
            "launch-timeout": 60,
            "cloud-images": [{"name": "base", "image-id": self.ami, "username": "ubuntu"}],
            "pools": [{k: v for k, v in pool_options.items() if v is not None}],
            **dashed(options),
        }

    @staticmethod
    def config(*providers: dict[str, Any], **top: Any) -> dict[str, Any]:
        names = {
            label["name"]: label
            for provider in providers
            for pool in provider["pools"]
            for label in pool["labels"]
        }
        return {
            "labels": [{"name": name} for name in names],
            "providers": list(providers),
            **dashed(top),
        }


def dashed(values: dict[str, Any]) -> dict[str, Any]:
    return {key.replace("_", "-"): value for key, value in values.items()}


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> Iterator[AwsCloud]:
    cloud = AwsCloud()
    cloud.setup_environment(monkeypatch)
    # moto's machines run immediately.
    monkeypatch.setattr("nodepool.driver.aws.adapter.AwsAdapter.LOOK_FLOOR", 0.05)
    monkeypatch.setattr("nodepool.driver.aws.adapter.AwsAdapter.DELETE_GATHER", 0.2)
    # A busy machine does not decide what is there after a start.
    monkeypatch.setattr("nodepool.driver.aws.adapter.AwsAdapter.TEMPLATE_WAIT", 10.0)
    try:
        yield cloud
    finally:
        cloud.close()
