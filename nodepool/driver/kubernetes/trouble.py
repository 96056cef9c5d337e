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
    for condition in _list(pod, "status", "conditions"):
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return _joined(condition.get("reason"), condition.get("message"))
    for kind in ("initContainerStatuses", "containerStatuses"):
        for status in _list(pod, "status", kind):
            state = status.get("state")
            waiting = state.get("waiting") if isinstance(state, dict) else None
            if isinstance(waiting, dict) and waiting.get("reason", "") not in _NORMAL:
                return _joined(
                    f"container {status.get('name')}", waiting.get("reason"), waiting.get("message")
                )
    return None


def failed(pod: dict[str, Any]) -> str | None:
    """Return why it has permanently failed; None: it has not."""
    status = pod.get("status") or {}
    phase = status.get("phase")
    if phase in ("Failed", "Succeeded"):
        ended = []
        for each in _list(pod, "status", "containerStatuses"):
            state = (each.get("state") or {}).get("terminated") or {}
            if state:
                exit_code = f"exit code {state.get('exitCode')}"
                ended.append(
                    _joined(
                        f"container {each.get('name')}",
                        state.get("reason"),
                        exit_code,
                        state.get("message"),
                    )
                )
        return _joined(
            f"the pod has ended ({phase})",
            status.get("reason"),
            status.get("message"),
            "; ".join(ended),
        )
    if (pod.get("metadata") or {}).get("deletionTimestamp"):
        return "others delete the pod"
    return None


def is_running(pod: dict[str, Any]) -> bool:
    return (pod.get("status") or {}).get("phase") == "Running" and waits(pod) is None


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
