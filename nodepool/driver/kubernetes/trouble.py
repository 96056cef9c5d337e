"""Why a pod does not start, or a namespace is not deleted (KUB-7, KUB-8)."""

from __future__ import annotations

from typing import Any

#: Normal reasons for which a container waits.
_NORMAL = ("ContainerCreating", "PodInitializing", "")


def _list(found: dict[str, Any], *path: str) -> list[dict[str, Any]]:
    value: Any = found
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _joined(*words: object) -> str:
    return ": ".join(str(word) for word in words if word)


def waits(pod: dict[str, Any]) -> str | None:
    """Return the cluster's reason why the pod makes no progress; None: it does."""
    conditions = {each.get("type"): each for each in _list(pod, "status", "conditions")}
    scheduled = conditions.get("PodScheduled", {})
    if scheduled.get("status") == "False":
        return _joined(scheduled.get("reason"), scheduled.get("message"))
    if _is_cut_off(conditions):
        return f"machine {(pod.get('spec') or {}).get('nodeName')} has stopped reporting"
    pending = (pod.get("status") or {}).get("phase") == "Pending"
    policy = (pod.get("spec") or {}).get("restartPolicy", "Always")
    for status in _list(pod, "status", "initContainerStatuses"):
        reason = _waiting(status) or _failure(status, "state")
        if not reason and pending and not _state(status, "state", "terminated"):
            # It is repeated; what made the last attempt fail is still the reason.
            reason = _failure(status, "lastState")
        if reason:
            return _joined(f"container {status.get('name')}", reason)
    for status in _list(pod, "status", "containerStatuses"):
        ended = _state(status, "state", "terminated")
        restarts = policy == "Always" or (policy == "OnFailure" and ended.get("exitCode"))
        reason = _waiting(status) or (_ended(ended) if ended and restarts else None)
        if reason:
            return _joined(f"container {status.get('name')}", reason)
    return None


def _is_cut_off(conditions: dict[Any, dict[str, Any]]) -> bool:
    """Return whether the cluster misses the machine of a pod.

    It only withdraws the readiness then, without a reason, 40 to 50 s after the last report; the
    pod is evicted five minutes later. A kubelet that withdraws it gives a reason (Kubernetes 1.37).
    """
    ready, containers = (conditions.get(name, {}) for name in ("Ready", "ContainersReady"))
    return (
        ready.get("status") == "False"
        and not ready.get("reason")
        and containers.get("status") == "True"
    )


def _state(status: dict[str, Any], when: str, name: str) -> dict[str, Any]:
    """Return the state ``name`` of a container now or before its restart; empty: another one."""
    state = status.get(when)
    found = state.get(name) if isinstance(state, dict) else None
    return found if isinstance(found, dict) else {}


def _waiting(status: dict[str, Any]) -> str | None:
    """Return why a container does not start, with how it ended before; None: it does."""
    waiting = _state(status, "state", "waiting")
    if waiting.get("reason", "") in _NORMAL:
        return None
    message, before = str(waiting.get("message") or ""), _failure(status, "lastState") or ""
    return _joined(
        waiting.get("reason"), message, before if not message or message not in before else None
    )


def _failure(status: dict[str, Any], when: str) -> str | None:
    ended = _state(status, when, "terminated")
    return _ended(ended) if ended.get("exitCode") else None


def _ended(ended: dict[str, Any]) -> str:
    return _joined(ended.get("reason"), f"exit code {ended.get('exitCode')}", ended.get("message"))


def failed(pod: dict[str, Any]) -> str | None:
    """Return why it has permanently failed; None: it has not."""
    status = pod.get("status") or {}
    phase = status.get("phase")
    if phase in ("Failed", "Succeeded"):
        ended = [
            _joined(f"container {each.get('name')}", _ended(state))
            for kind in ("initContainerStatuses", "containerStatuses")
            for each in _list(pod, "status", kind)
            if (state := _state(each, "state", "terminated"))
            and (state.get("exitCode") or kind == "containerStatuses")
        ]
        return _joined(
            f"the pod has ended ({phase})",
            status.get("reason"),
            status.get("message"),
            "; ".join(ended),
        )
    if (pod.get("metadata") or {}).get("deletionTimestamp"):
        return "others delete the pod"
    return None


def warning(events: list[dict[str, Any]]) -> str | None:
    """Return the latest warning about an object; None: there is none."""
    found = [each for each in events if each.get("type") == "Warning"]
    last = max(found, key=lambda each: str(each.get("lastTimestamp") or ""), default={})
    return _joined(last.get("reason"), last.get("message")) or None


def unnoticed(pod: dict[str, Any]) -> str | None:
    """Return which machine has not noticed its pod; None: it has, or none was chosen."""
    machine = (pod.get("spec") or {}).get("nodeName")
    if not machine or (pod.get("status") or {}).get("startTime"):
        return None
    return f"the kubelet of machine {machine} does not react"


def is_running(pod: dict[str, Any]) -> bool:
    """Return whether all containers run that should, and nobody is deleting the pod."""
    phase = (pod.get("status") or {}).get("phase")
    return phase == "Running" and waits(pod) is None and failed(pod) is None


def stuck(namespace: dict[str, Any]) -> str:
    """Return what the deletion of a namespace waits for."""
    told = [
        _joined(condition.get("type"), condition.get("message"))
        for condition in _list(namespace, "status", "conditions")
        if condition.get("status") == "True"
    ]
    finalizers = [*((namespace.get("spec") or {}).get("finalizers") or [])]
    finalizers += (namespace.get("metadata") or {}).get("finalizers") or []
    if finalizers:
        told.append(f"finalizers {', '.join(map(str, finalizers))}")
    return "; ".join(told) or "no reason reported"
