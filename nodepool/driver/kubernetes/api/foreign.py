"""Clients of the package ``kubernetes``, or those that tests of others put in their place (KUB-12): their methods, as ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nodepool.driver.kubernetes.api.client import Object
from nodepool.driver.kubernetes.api.errors import ApiError
from nodepool.driver.kubernetes.api.kinds import NAMESPACE, PROJECT, PROJECT_REQUEST, Kind

#: What we read of an answer: attribute -> name that the API has for it, or what is inside.
_PARTS: dict[str, Any] = {
    "metadata": {"name": "name", "namespace": "namespace", "labels": "labels", "deletion_timestamp": "deletionTimestamp"},
    "spec": {"node_name": "nodeName"},
    "status": {"phase": "phase", "message": "message", "reason": "reason"},
    "data": "data",
    "secrets": "secrets",
}


def _object(value: Any, parts: dict[str, Any] | None = None) -> Object:
    """A dict of what has attributes, or items."""
    found: Object = {}
    for name, inside in (parts or _PARTS).items():
        api_name = inside if isinstance(inside, str) else name
        if isinstance(value, dict):
            part = value.get(name, value.get(api_name))
        else:
            part = getattr(value, name, getattr(value, api_name, None))
        if part is None:
            continue
        if isinstance(inside, dict):
            part = _object(part, inside)
        elif name == "secrets":
            part = [_object(each, {"name": "name"}) for each in part]
        found[api_name] = part
    return found


class ForeignCluster:
    """A core client, and a second one for roles or for OpenShift's own kinds."""

    watches = False

    def __init__(self, core: Any, second: Any) -> None:
        self._core = core
        self._second = second
        configuration = getattr(getattr(core, "api_client", None), "configuration", None)
        configuration = configuration or getattr(second, "configuration", None)
        self.host = str(getattr(configuration, "host", ""))
        self.skip_tls = not getattr(configuration, "verify_ssl", True)

    def create(self, kind: Kind, body: Object, namespace: str | None = None) -> Object:
        arguments: tuple[Any, ...] = (body,) if namespace is None else (namespace, body)
        resource = self._resource(kind)
        if resource is not None:
            return _object(resource.create(body=body, **({"namespace": namespace} if namespace else {})))
        return _object(self._method("create", kind)(*arguments))

    def get(self, kind: Kind, name: str, namespace: str | None = None) -> Object:
        try:
            resource = self._resource(kind)
            if resource is not None:
                return _object(resource.get(name=name))
            return _object(self._method("read", kind)(*((name,) if namespace is None else (name, namespace))))
        except Exception as error:
            # What is not there is told by an exception without a status.
            status = getattr(error, "status", None) or 404
            raise ApiError(f"get {kind.name} {name}", status, "", str(error)) from error

    def delete(self, kind: Kind, name: str, namespace: str | None = None) -> None:
        try:
            resource = self._resource(kind)
            if resource is not None:
                resource.delete(name=name)
                return
            method = self._method("delete", kind)
            arguments = (name,) if namespace is None else (name, namespace)
            try:
                method(*arguments, {"propagationPolicy": "Background"})
            except TypeError:
                method(*arguments)
        except Exception as error:
            status = getattr(error, "status", None) or 404
            raise ApiError(f"delete {kind.name} {name}", status, "", str(error)) from error

    def list(self, kind: Kind, selector: str = "", namespace: str | None = None) -> list[Object]:
        resource = self._resource(kind)
        if resource is not None:
            found = resource.get()
        else:
            found = self._method("list", kind)(*(() if namespace is None else (namespace,)))
        objects = [_object(each) for each in getattr(found, "items", None) or []]
        return [each for each in objects if _selected(each, selector)]

    def close(self) -> None:
        pass

    def _resource(self, kind: Kind) -> Any:
        """Of a dynamic client; None when it is one with a method per call."""
        if kind in (PROJECT, PROJECT_REQUEST) or "openshift" in kind.version:
            names = {"projects": "Project", "projectrequests": "ProjectRequest", "rolebindings": "RoleBinding"}
            return self._second.resources.get(api_version=kind.version, kind=names[kind.plural])
        return None

    def _method(self, verb: str, kind: Kind) -> Callable[..., Any]:
        name = kind.name.replace(" ", "_")
        name = f"{verb}_{name}" if kind is NAMESPACE else f"{verb}_namespaced_{name}"
        client = self._second if kind.version.startswith("rbac.") else self._core
        method = getattr(client, name, None)
        if method is None:
            raise ApiError(f"{verb} {kind.name}", 405, "", f"{type(client).__name__} has no {name}")
        found: Callable[..., Any] = method
        return found


def _selected(found: Object, selector: str) -> bool:
    """Objects whose labels are not told count, too: the caller checks them."""
    labels = (found.get("metadata") or {}).get("labels")
    if not selector or not isinstance(labels, dict):
        return True
    name, _, value = selector.partition("=")
    return name not in labels or labels[name] == value
