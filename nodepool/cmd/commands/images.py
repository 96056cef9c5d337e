"""Images, their builds and uploads; all but the listings only leave orders for the builders."""

from __future__ import annotations

from nodepool import status
from nodepool.cmd.commands.context import CommandError, Context, Subparsers, add_command, add_listing
from nodepool.zk.records import BUILDING, DELETING, UPLOADING


def register(subparsers: Subparsers) -> None:
    add_listing(subparsers, "image-list", image_list, "list image uploads")
    add_listing(subparsers, "dib-image-list", dib_image_list, "list image builds")
    add_listing(subparsers, "image-status", image_status, "list images with pause flag and build requests")
    for name, function, text in (
        ("image-build", image_build, "request the build of an image"),
        ("image-pause", image_pause, "stop building an image"),
        ("image-unpause", image_unpause, "build an image again"),
    ):
        parser = add_command(subparsers, name, function, text)
        parser.add_argument("image", metavar="IMAGE", help="image name")
    parser = add_command(subparsers, "image-delete", image_delete, "delete an upload")
    parser.add_argument("--provider", metavar="P", required=True, help="provider name")
    parser.add_argument("--image", metavar="I", required=True, help="image name")
    parser.add_argument("--upload-id", metavar="U", required=True, help="upload id")
    parser.add_argument("--build-id", metavar="B", required=True, help="build id")
    parser = add_command(subparsers, "dib-image-delete", dib_image_delete, "delete a build with its uploads")
    parser.add_argument("id", metavar="ID", help="<image>-<build id>")


def image_list(context: Context) -> None:
    context.show(status.image_list(context.zk))


def dib_image_list(context: Context) -> None:
    context.show(status.dib_image_list(context.zk))


def image_status(context: Context) -> None:
    context.show(status.image_status(context.zk))


def image_build(context: Context) -> None:
    name = context.args.image
    image = context.config.diskimages.get(name)
    if image is None:
        raise CommandError(f"Trying to build a non disk-image-builder image: {name}")
    if image.pause:
        raise CommandError(f"Skipping build request for image {name}; paused")
    context.zk.submitBuildRequest(name)


def image_pause(context: Context) -> None:
    name = context.args.image
    known = name in context.config.diskimages or name in context.zk.getImageNames()
    if not known:
        raise CommandError(f"image {name} is neither in {context.args.config} nor in ZooKeeper")
    context.zk.setImagePaused(name, True)


def image_unpause(context: Context) -> None:
    name = context.args.image
    if "/" in name:
        raise CommandError(f"{name} is no image name")
    context.zk.setImagePaused(name, False)


def image_delete(context: Context) -> None:
    args, zk = context.args, context.zk
    upload = zk.getImageUpload(args.image, args.build_id, args.provider, args.upload_id)
    if upload is None:
        print("Image upload not found")
    elif upload.state == UPLOADING:
        print("Cannot delete because image upload in progress")
    else:
        upload.state = DELETING
        zk.storeImageUpload(args.image, args.build_id, args.provider, upload, args.upload_id)


def dib_image_delete(context: Context) -> None:
    image, dash, build_id = context.args.id.rpartition("-")
    if not (image and dash and build_id):
        raise CommandError(f"{context.args.id} is no <image>-<build id>; take the ID column of dib-image-list")
    zk = context.zk
    build = zk.getBuild(image, build_id)
    if build is None:
        print("Build ID not found")
    elif build.state == BUILDING:
        print("Cannot delete a build in progress")
    else:
        build.state = DELETING
        zk.storeBuild(image, build, build_id)
