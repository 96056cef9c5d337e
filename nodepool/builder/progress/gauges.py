"""Gauges about requests and workers of the builder (CLI-7.1)."""

from __future__ import annotations

from nodepool import metrics
from nodepool.builder.progress.phases import PHASES
from nodepool.builder.retention import image_providers
from nodepool.builder.state import BuilderState
from nodepool.config.model import Config
from nodepool.metrics import Metrics
from nodepool.zk.mirror.images import ImageData
from nodepool.zk.records.progress import BuildProgress

IDLE, WORKING, UPLOADING, PAUSED = 0, 1, 2, 3


def gauges(
    config: Config,
    data: ImageData,
    fqdn: str,
    building: list[str | None],
    uploading: list[tuple[str, str] | None],
) -> dict[str, int]:
    """Return name -> value.

    :param building: image of each build worker.
    :param uploading: image and provider of each upload worker.
    """
    pending = {image for image in data.requests if not data.served(image)}
    result: dict[str, int] = {
        metrics.BUILD_REQUESTS(): len(pending),
        metrics.CURRENT_BUILDS(fqdn): sum(1 for image in building if image is not None),
        metrics.CURRENT_UPLOADS(fqdn): sum(1 for pair in uploading if pair is not None),
        metrics.BUILD_WORKERS(fqdn): len(building),
        metrics.UPLOAD_WORKERS(fqdn): len(uploading),
    }
    for image in sorted(data.names):
        diskimage = config.diskimages.get(image)
        paused = image in data.paused or (diskimage is not None and diskimage.pause)
        result[metrics.BUILD_REQUESTED(image)] = int(image in pending)
        result[metrics.BUILD_STATE(fqdn, image)] = (
            PAUSED if paused else WORKING if image in building else IDLE
        )
    for provider in image_providers(config):
        for image, entry in provider.diskimages.items():
            state = (
                UPLOADING
                if (image, provider.name) in uploading
                else PAUSED
                if entry.pause
                else IDLE
            )
            result[metrics.UPLOAD_STATE(fqdn, image, provider.name)] = state
    return result


def build_progress(statsd: Metrics, fqdn: str, progress: BuildProgress, now: float) -> None:
    """Set the gauges of a build: elapsed and expected seconds, phase; zeros if ended."""
    running = progress.running
    phase = PHASES.index(progress.phase) + 1 if running and progress.phase in PHASES else 0
    statsd.gauge(metrics.BUILD_PHASE(fqdn, progress.image), phase)
    statsd.gauge(
        metrics.BUILD_ELAPSED(fqdn, progress.image),
        int(progress.elapsed(now) or 0) if running else 0,
    )
    statsd.gauge(
        metrics.BUILD_EXPECTED(fqdn, progress.image), int(progress.expected or 0) if running else 0
    )


def emit(state: BuilderState) -> None:
    values = gauges(
        state.config,
        state.zk.readImages(),
        state.fqdn,
        [at and at[0] for at in state.building()],
        state.uploading(),
    )
    state.statsd.keep("builder", values)
    for name, value in values.items():
        state.statsd.gauge(name, value)
