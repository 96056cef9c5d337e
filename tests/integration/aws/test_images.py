"""Images of the aws driver with a whole builder (AWS-2.8, AWS-2.9, AWS-3.14 to AWS-3.18),
against moto over HTTP.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from nodepool.base.backoff import Backoff
from nodepool.cmd import nodepoolcmd
from nodepool.driver.aws.adapter import AwsAdapter
from nodepool.driver.aws.images.ebs_direct import EBSSnapshotUploader
from tests.conftest import wait_for
from tests.support.aws.cloud import AwsCloud
from tests.support.aws.scene import adapter, cleanup, instance, one, start, tags
from tests.support.builder import BuilderBench
from tests.support.fault_proxy import cut_off, drop, ec2_error, html, reply
from tests.support.launcher import LauncherBench
from tests.support.node_ids import spend_node_ids

STORE = {"object-storage": {"bucket-name": "nodepool"}}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(AwsAdapter, "IMAGE_UPLOAD_SLEEP", 0.05)
    monkeypatch.setattr("nodepool.cloud.calls.BACKOFF", Backoff(0.05, 1.0))
    yield


def provider(aws: AwsCloud, *images: dict[str, Any], **options: Any) -> dict[str, Any]:
    given = {"name": "fake-image", "tags": {"provider_metadata": "provider", "number": 1}}
    entries = [{**given, **image} for image in images or [{}]]
    result: dict[str, Any] = aws.provider(pool={"labels": []}, diskimages=entries, **options)
    return {**result, **STORE}


def build(builders: BuilderBench, aws: AwsCloud, *images: dict[str, Any], **options: Any) -> Any:
    """Builds and uploads the image; the upload's record."""
    image = builders.image(metadata={"diskimage_metadata": "diskimage"}, username="image-user")
    builders.start(builders.config([image], [provider(aws, *images, **options)]))
    return builders.wait_upload(provider="ec2-us")


def check_tags(tagged: Any, upload: Any) -> None:
    found = tags(tagged)
    assert found.pop("nodepool_cluster_id")
    assert found == {
        "diskimage_metadata": "diskimage",
        "provider_metadata": "provider",
        "number": "1",
        "nodepool_build_id": upload.build_id,
        "nodepool_upload_id": upload.id,
        "nodepool_provider_name": "ec2-us",
    }


def test_alien_images_are_ours_without_a_record(
    builders: BuilderBench, aws: AwsCloud, capsys: pytest.CaptureFixture[str]
) -> None:
    """``alien-image-list``: ours without a record; not the one in use, and not what others made."""
    image = builders.image(username="image-user")
    config = builders.config([image], [provider(aws)])
    builders.start(config)
    builders.wait_upload(provider="ec2-us")
    made = {
        name: aws.ec2.register_image(Name=name, RootDeviceName="/dev/sda1")["ImageId"]
        for name in ("alien", "foreign")
    }
    aws.ec2.create_tags(
        Resources=[made["alien"]], Tags=[{"Key": "nodepool_build_id", "Value": "b"}]
    )
    capsys.readouterr()
    assert nodepoolcmd.main(["-c", config, "alien-image-list"]) == 0
    rows = [
        line.strip("| ").split()
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("|")
    ]
    assert [row for row in rows if row[0] != "Provider"] == [
        ["ec2-us", "|", "alien", "|", made["alien"]]
    ]


@pytest.mark.spec(
    "AWS-3.14: snapshot import survives a resource-limit error; tags of both sources; no "
    "ImdsSupport"
)
def test_snapshot_import_survives_a_resource_limit(builders: BuilderBench, aws: AwsCloud) -> None:
    limit = aws.proxy.fail("ImportSnapshot", ec2_error("ResourceCountLimitExceeded"))
    upload = build(
        builders, aws, {"iops": 1000, "throughput": 100, "volume-size": 20}, image_import_timeout=60
    )
    assert limit.used == 1
    (image,) = aws.images()
    assert image["ImageId"] == upload.external_id
    assert image["Name"] == upload.external_name
    check_tags(image, upload)
    (snapshot,) = aws.snapshots()
    check_tags(aws.ec2.describe_snapshots(SnapshotIds=[snapshot])["Snapshots"][0], upload)
    assert aws.objects() == [], "the object is removed after the import"
    (request,) = aws.proxy.seen("RegisterImage")
    assert "ImdsSupport" not in request.params
    assert request.params["Architecture"] == "x86_64"
    assert request.params["EnaSupport"] == "true"
    device = {
        key.rpartition(".")[2]: value for key, value in request.params.items() if ".Ebs." in key
    }
    assert aws.like.real_snapshot(device.pop("SnapshotId")) == snapshot
    assert device == {
        "DeleteOnTermination": "true",
        "VolumeSize": "20",
        "VolumeType": "gp3",
        "Iops": "1000",
        "Throughput": "100",
    }
    (put,) = [r for r in aws.proxy.requests if r.method == "PUT" and upload.external_name in r.path]
    assert "nodepool_build_id=" in put.headers["x-amz-tagging"]
    assert upload.external_name + ".raw" in put.path


@pytest.mark.spec("AWS-3.14: ImdsSupport when asked; encrypted with a key")
def test_snapshot_import_options(builders: BuilderBench, aws: AwsCloud) -> None:
    build(builders, aws, {"imds-support": "v2.0", "kms-key-id": "key-1"})
    assert aws.proxy.seen("RegisterImage")[0].params["ImdsSupport"] == "v2.0"
    params = aws.proxy.seen("ImportSnapshot")[0].params
    assert (params["Encrypted"], params["KmsKeyId"]) == ("true", "key-1")


@pytest.mark.spec("AWS-2.8: a task that ends without a result is an error, the object is removed")
def test_import_that_fails(builders: BuilderBench, aws: AwsCloud) -> None:
    new_task = aws.like.new_task

    def deleted(kind: str, with_tags: dict[str, str], looks: int | None = None) -> str:
        task = new_task(kind, with_tags, looks)
        aws.like.tasks[task]["status"] = "deleted"
        return task

    aws.like.new_task = deleted  # type: ignore[method-assign]
    image = builders.image()
    builders.start(builders.config([image], [provider(aws)]), cleanup_interval=0)
    wait_for(lambda: builders.uploads(provider="ec2-us", state="failed"), 20, "a failed upload")
    wait_for(lambda: aws.objects() == [], 10, "object removed")
    assert aws.images() == []


@pytest.mark.parametrize("fault", ["ExpiredToken", "Throttling", "drop"])
def test_an_import_outlives_failed_polls(
    builders: BuilderBench, aws: AwsCloud, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setattr("nodepool.driver.aws.adapter.READ_DEADLINE", 0.2)
    failing = aws.proxy.fail(
        "DescribeImportSnapshotTasks", drop() if fault == "drop" else ec2_error(fault), times=8
    )
    build(builders, aws)
    assert failing.used == 8
    assert len(aws.proxy.seen("ImportSnapshot")) == 1, "the first upload is the one that succeeds"


@pytest.mark.parametrize("method", ["snapshot", "image"])
def test_an_import_that_cannot_be_seen_at_all(
    aws: AwsCloud, bench: LauncherBench, tmp_path: Any, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nodepool.driver.aws.images.imports.IMPORT_LIMIT", 0.5)
    (tmp_path / "image").write_bytes(b"x")
    start(bench, aws, object_storage={"bucket-name": "nodepool"})
    options = SimpleNamespace(
        import_method=method, encrypted=False, kms_key_id=None, architecture="x86_64"
    )
    for fault, error in (
        ("ExpiredToken", "Timeout importing"),
        ("UnauthorizedOperation", "UnauthorizedOperation"),
    ):
        kind = "Snapshot" if method == "snapshot" else "Image"
        aws.proxy.fail(f"DescribeImport{kind}Tasks", ec2_error(fault), times=float("inf"))
        with pytest.raises(Exception, match=error):
            adapter(bench).images.upload(options, "image", str(tmp_path / "image"), "raw", {})
        assert aws.objects() == []
        aws.proxy.heal()


@pytest.mark.spec("AWS-3.15: image import: AMI and snapshot tagged from both sources")
def test_image_import_tags_image_and_snapshot(builders: BuilderBench, aws: AwsCloud) -> None:
    upload = build(builders, aws, {"import-method": "image"})
    (image,) = aws.images()
    assert image["ImageId"] == upload.external_id
    check_tags(image, upload)
    (snapshot,) = aws.snapshots()
    check_tags(aws.ec2.describe_snapshots(SnapshotIds=[snapshot])["Snapshots"][0], upload)
    assert aws.objects() == []


@pytest.mark.spec("AWS-3.15: ebs-direct with IMDSv2; needs no object storage")
def test_ebs_direct_needs_no_object_storage(builders: BuilderBench, aws: AwsCloud) -> None:
    image = builders.image(metadata={"diskimage_metadata": "diskimage"})
    options = provider(
        aws, {"import-method": "ebs-direct", "imds-support": "v2.0", "volume-size": 12}
    )
    del options["object-storage"]
    builders.start(builders.config([image], [options]))
    upload = builders.wait_upload(provider="ec2-us")
    (ami,) = aws.images()
    assert ami["ImageId"] == upload.external_id
    check_tags(ami, upload)
    (request,) = aws.proxy.seen("RegisterImage")
    assert request.params["ImdsSupport"] == "v2.0"
    assert request.params["BlockDeviceMapping.1.Ebs.VolumeSize"] == "12", (
        "the larger of size and volume-size"
    )
    puts = [r for r in aws.proxy.requests if r.method == "PUT" and "/blocks/" in r.path]
    assert puts
    assert all(len(r.body) == EBSSnapshotUploader.segment_size for r in puts)


@pytest.mark.spec("AWS-2.8: blocks are retried; nothing stays behind after a failure")
def test_blocks_are_retried_and_a_failed_upload_leaves_nothing(
    aws: AwsCloud, tmp_path: Any, bench: LauncherBench
) -> None:
    start(bench, aws)
    path = tmp_path / "image.raw"
    block = EBSSnapshotUploader.segment_size
    path.write_bytes(b"a" * block + bytes(2 * block) + b"b" * 1000)
    aws.proxy.fail(lambda r: r.operation.startswith("PUT /snapshots/"), html(503))
    aws.proxy.fail(lambda r: r.operation.startswith("PUT /snapshots/"), drop())

    def upload() -> Any:
        made = EBSSnapshotUploader(
            adapter(bench), adapter(bench).log, str(path), "image", {"key": "value"}
        )
        return made.upload(60), made

    (snapshot, size), made = upload()
    assert (size, made._sent) == (1, {0, 3}), "blank blocks are not sent"
    assert tags(aws.ec2.describe_snapshots(SnapshotIds=[snapshot])["Snapshots"][0]) == {
        "key": "value"
    }
    aws.ec2.delete_snapshot(SnapshotId=snapshot)
    refused = reply(400, '{"Message": "no", "Reason": "INVALID"}', "application/json")
    aws.proxy.fail(lambda r: r.operation.startswith("PUT /snapshots/"), refused, times=float("inf"))
    with pytest.raises(Exception, match="PutSnapshotBlock"):
        upload()
    assert aws.snapshots() == []


@pytest.mark.spec("AWS-3.16: removing the image from the configuration deletes upload and build")
@pytest.mark.parametrize("method", ["snapshot", "image", "ebs-direct"])
def test_image_removed_from_the_configuration_is_deleted(
    builders: BuilderBench, aws: AwsCloud, method: str
) -> None:
    upload = build(builders, aws, {"import-method": method})
    assert aws.images()
    builders.config([], [{**aws.provider(pool={"labels": []}), "diskimages": []}])
    builders.wait_gone("fake-image", upload.build_id)
    assert aws.images() == []
    assert aws.snapshots() == []
    assert aws.objects() == []


@pytest.mark.spec(
    "AWS-3.14: nodes use the disk image's user name; the label's iops and throughput reach the "
    "instance"
)
def test_node_of_an_uploaded_image(
    builders: BuilderBench, bench: LauncherBench, aws: AwsCloud
) -> None:
    upload = build(builders, aws)
    content = aws.config(
        {
            **provider(aws),
            "pools": aws.provider(aws.label(diskimage="fake-image", iops=2000, throughput=300))[
                "pools"
            ],
        },
        diskimages=[{"name": "fake-image", "username": "another-user"}],
    )
    bench.start(content, cleanup_interval=600)
    _, node = one(bench)
    assert instance(aws, node)["ImageId"] == upload.external_id
    assert node.username == "another-user"
    assert node.image_id.endswith(upload.id)
    params = aws.proxy.seen("RunInstances")[0].params
    assert (
        params["BlockDeviceMapping.1.Ebs.Iops"],
        params["BlockDeviceMapping.1.Ebs.Throughput"],
    ) == ("2000", "300")
    assert params["BlockDeviceMapping.1.DeviceName"] == "/dev/sda1"


# -- leaks


def nodepool_tags(**more: str) -> list[dict[str, str]]:
    return [
        {"Key": key, "Value": value}
        for key, value in {"nodepool_provider_name": "ec2-us", **more}.items()
    ]


@pytest.mark.spec("AWS-3.17: leaked instance, volume and object are removed and counted")
def test_leaked_resources_are_deleted_and_counted(
    bench: LauncherBench, aws: AwsCloud, statsd: Any
) -> None:
    spend_node_ids(bench.zk)
    pool = start(bench, aws, object_storage={"bucket-name": "nodepool"})
    _, node = one(bench)
    of_lost_node = nodepool_tags(nodepool_node_id="0000000042", nodepool_pool_name="main")
    aws.ec2.run_instances(
        ImageId=aws.ami,
        MinCount=1,
        MaxCount=1,
        InstanceType="t3.medium",
        SubnetId=aws.subnet,
        TagSpecifications=[{"ResourceType": "instance", "Tags": of_lost_node}],
    )
    volume = aws.ec2.create_volume(
        AvailabilityZone="us-east-1a",
        Size=5,
        TagSpecifications=[{"ResourceType": "volume", "Tags": of_lost_node}],
    )["VolumeId"]
    aws.ec2.allocate_hosts(
        AvailabilityZone="us-east-1a",
        InstanceType="c5.large",
        Quantity=1,
        TagSpecifications=[{"ResourceType": "dedicated-host", "Tags": of_lost_node}],
    )
    upload = (
        "nodepool_provider_name=ec2-us&nodepool_build_id=0000000042&nodepool_upload_id=0000000042"
    )
    aws.s3.put_object(Bucket="nodepool", Key="testimage", Body=b"x", Tagging=upload)
    aws.s3.put_object(
        Bucket="nodepool", Key="foreign", Body=b"x", Tagging=upload.replace("ec2-us", "other")
    )
    cleanup(bench)
    assert len(aws.instances()) == 2, "one sighting is not enough"
    asked = len([r for r in aws.proxy.requests if "tagging" in r.path])
    cleanup(bench, 1)
    assert len([r for r in aws.proxy.requests if "tagging" in r.path]) == asked, (
        "tags of an object are asked for once"
    )
    assert [each["InstanceId"] for each in aws.instances()] == [node.external_id["instance"]]
    assert aws.hosts() == []
    assert volume not in [each["VolumeId"] for each in aws.ec2.describe_volumes()["Volumes"]]
    assert aws.objects() == ["foreign"]
    for kind in ("instances", "volumes", "objects", "hosts"):
        statsd.wait(f"nodepool.provider.ec2-us.leaked.{kind}", "1|c")
    bench.stop(pool)


@pytest.mark.spec(
    "AWS-3.17: untagged import results are recognised; a live image of another build stays"
)
@pytest.mark.parametrize("kind", ["snap", "ami"])
def test_leaked_import_results_are_deleted_and_live_images_stay(
    bench: LauncherBench, aws: AwsCloud, kind: str
) -> None:
    live = bench.store_image("fake-image", "ec2-us")
    start(bench, aws)
    of_live = {
        "nodepool_provider_name": "ec2-us",
        "nodepool_build_id": live.build_id,
        "nodepool_upload_id": live.id,
    }
    of_lost = {**of_live, "nodepool_build_id": "build-of-old"}
    made = {}
    for name, task_tags in (
        ("live", of_live),
        ("lost", of_lost),
        ("foreign", {**of_lost, "nodepool_provider_name": "other"}),
    ):
        task = aws.like.tasks[aws.like.new_task(kind, task_tags, looks=0)]
        made[name] = task["snapshot"]
        if kind == "snap":
            task["image"] = aws.ec2.register_image(Name=name, Architecture="x86_64")["ImageId"]
            aws.like.put_in_place(task["image"], task["snapshot"])
        made[f"{name} image"] = task["image"]
    cleanup(bench, 3)
    images = [each["ImageId"] for each in aws.images()]
    assert sorted(images) == sorted([made["live image"], made["foreign image"]])
    assert sorted(aws.snapshots()) == sorted(
        [aws.like.real_snapshot(made[name]) for name in ("live", "foreign")]
    )
    looked = len(aws.proxy.seen("DescribeImportImageTasks")) + len(
        aws.proxy.seen("DescribeImportSnapshotTasks")
    )
    cleanup(bench)
    now = len(aws.proxy.seen("DescribeImportImageTasks")) + len(
        aws.proxy.seen("DescribeImportSnapshotTasks")
    )
    assert now == looked, "foreign ones are remembered"


@pytest.mark.spec("AWS-3.18: a missing import task is None")
def test_missing_import_task(bench: LauncherBench, aws: AwsCloud) -> None:
    start(bench, aws)
    assert adapter(bench)._getImportImageTask("test") is None
    assert adapter(bench).images.task("snapshot", "test") is None
    assert adapter(bench).calls.troubles() == []


def test_removal_of_missing_resources_succeeds(bench: LauncherBench, aws: AwsCloud) -> None:
    start(bench, aws)
    for kind, prefix in (
        ("ami", "ami"),
        ("snapshot", "snap"),
        ("volume", "vol"),
        ("instance", "i"),
    ):
        adapter(bench).remove(kind, f"{prefix}-00000000000000000")
    adapter(bench).deleteImage("ami-00000000000000000")


@pytest.mark.parametrize("operation", ["DescribeVolumes", "DescribeImages", "DescribeSnapshots"])
def test_a_list_that_fails_stops_no_other_cleanup(
    bench: LauncherBench, aws: AwsCloud, operation: str
) -> None:
    spend_node_ids(bench.zk)
    start(bench, aws)
    aws.ec2.run_instances(
        ImageId=aws.ami,
        MinCount=1,
        MaxCount=1,
        InstanceType="t3.medium",
        SubnetId=aws.subnet,
        TagSpecifications=[
            {"ResourceType": "instance", "Tags": nodepool_tags(nodepool_node_id="42")}
        ],
    )
    aws.proxy.fail(operation, ec2_error("UnauthorizedOperation", 403), times=float("inf"))
    cleanup(bench, 2)
    assert aws.instances() == []


def test_images_of_others_are_listed_without_metadata(bench: LauncherBench, aws: AwsCloud) -> None:
    start(bench, aws)
    (found,) = adapter(bench)._listImages()
    assert (found["id"], found["name"], found["properties"]) == (aws.ami, "base", {})


def test_upload_to_s3_survives_a_bad_moment(builders: BuilderBench, aws: AwsCloud) -> None:
    fault = aws.proxy.fail(lambda r: r.method == "PUT" and ".raw" in r.path, html(503))
    other = aws.proxy.fail(lambda r: r.operation == "DescribeImportSnapshotTasks", cut_off())
    build(builders, aws)
    assert (fault.used, other.used) == (1, 1)


@pytest.mark.parametrize("size", [100_000, 20_000_000], ids=["whole", "parts"])
def test_a_throttled_upload_to_s3_restarts(
    bench: LauncherBench, aws: AwsCloud, tmp_path: Any, size: int
) -> None:
    """What the first try has read of the file is sent again."""
    start(bench, aws, object_storage={"bucket-name": "nodepool"})
    content = bytes(number % 251 for number in range(1000)) * (size // 1000)
    path = tmp_path / "image.raw"
    path.write_bytes(content)
    slow_down = reply(
        503,
        "<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>",
    )
    # As often as the library itself tries to send one part.
    fault = aws.proxy.fail(
        lambda r: (
            r.method == "PUT"
            and "image.raw" in r.path
            and ("partNumber=" not in r.path or "partNumber=1" in r.path)
        ),
        slow_down,
        times=5,
    )
    adapter(bench).upload_object("nodepool", "image.raw", str(path), "a=b")
    assert fault.used == 5
    assert aws.s3.get_object(Bucket="nodepool", Key="image.raw")["Body"].read() == content
