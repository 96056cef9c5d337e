"""Kinds of objects and their paths in the API."""

from __future__ import annotations

import urllib.parse
from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """One resource of the API."""

    #: For messages and metrics, in the singular.
    name: str
    #: ``v1``, or group and version.
    version: str
    plural: str
    namespaced: bool = True

    def path(self, namespace: str | None = None, name: str | None = None) -> str:
        """Return the path of an object, or without a name of all in the namespace or cluster."""
        root = "api" if "/" not in self.version else "apis"
        parts = [root, *self.version.split("/")]
        if namespace is not None and self.namespaced:
            parts += ["namespaces", namespace]
        parts.append(self.plural)
        if name is not None:
            parts.append(name)
        return "/" + "/".join(urllib.parse.quote(part, safe="") for part in parts)


NAMESPACE = Kind("namespace", "v1", "namespaces", namespaced=False)
POD = Kind("pod", "v1", "pods")
EVENT = Kind("event", "v1", "events")
SECRET = Kind("secret", "v1", "secrets")
SERVICE_ACCOUNT = Kind("service account", "v1", "serviceaccounts")
LIMIT_RANGE = Kind("limit range", "v1", "limitranges")
ROLE = Kind("role", "rbac.authorization.k8s.io/v1", "roles")
ROLE_BINDING = Kind("role binding", "rbac.authorization.k8s.io/v1", "rolebindings")
NETWORK_POLICY = Kind("network policy", "networking.k8s.io/v1", "networkpolicies")
DAEMON_SET = Kind("daemon set", "apps/v1", "daemonsets")
PROJECT = Kind("project", "project.openshift.io/v1", "projects", namespaced=False)
PROJECT_REQUEST = Kind(
    "project request", "project.openshift.io/v1", "projectrequests", namespaced=False
)
OPENSHIFT_ROLE_BINDING = Kind("role binding", "authorization.openshift.io/v1", "rolebindings")
