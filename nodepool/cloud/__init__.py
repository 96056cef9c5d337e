"""Access to a cloud: rate-limited calls with deadlines, shared polls, batched deletions.

This package imports no cloud library: a driver provides its calls and a classifier of errors.
"""

from __future__ import annotations

from nodepool.cloud.calls import CloudCalls, LastError
from nodepool.cloud.deletions import DeleteBatches
from nodepool.cloud.errors import (
    CallsStopped,
    CallTimeout,
    Classifier,
    ErrorKind,
    bounded,
    message_of,
    translate,
)
from nodepool.cloud.polling import Observation, Poller, Subscription
from nodepool.cloud.rates import AdaptiveRate

__all__ = [
    "AdaptiveRate",
    "CallTimeout",
    "CallsStopped",
    "Classifier",
    "CloudCalls",
    "DeleteBatches",
    "ErrorKind",
    "LastError",
    "Observation",
    "Poller",
    "Subscription",
    "bounded",
    "message_of",
    "translate",
]
