"""An API server that only knows objects it was given, for what a chart looks up (`helm template --dry-run=server`)."""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

_KINDS = {
    "v1": [
        ("configmaps", "ConfigMap"),
        ("persistentvolumeclaims", "PersistentVolumeClaim"),
        ("pods", "Pod"),
        ("secrets", "Secret"),
        ("serviceaccounts", "ServiceAccount"),
        ("services", "Service"),
    ],
    "apps/v1": [("deployments", "Deployment"), ("statefulsets", "StatefulSet")],
    "autoscaling/v2": [("horizontalpodautoscalers", "HorizontalPodAutoscaler")],
    "batch/v1": [("jobs", "Job")],
    "networking.k8s.io/v1": [("networkpolicies", "NetworkPolicy")],
    "policy/v1": [("poddisruptionbudgets", "PodDisruptionBudget")],
    "ray.io/v1": [("rayservices", "RayService")],
    "rbac.authorization.k8s.io/v1": [("rolebindings", "RoleBinding"), ("roles", "Role")],
}


@contextlib.contextmanager
def api_server(objects: Sequence[dict[str, Any]], folder: Path) -> Iterator[Path]:
    """Serves objects, which have namespaces, on loopback. Yields the path of a kubeconfig."""
    answers: dict[str, Any] = {
        "/version": {"major": "1", "minor": "36", "gitVersion": "v1.36.2"},
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
        "/apis": {
            "kind": "APIGroupList",
            "groups": [
                {
                    "name": version.partition("/")[0],
                    "versions": [{"groupVersion": version, "version": version.partition("/")[2]}],
                    "preferredVersion": {"groupVersion": version, "version": version.partition("/")[2]},
                }
                for version in _KINDS
                if "/" in version
            ],
        },
    }
    for version, kinds in _KINDS.items():
        answers[_root(version)] = {
            "kind": "APIResourceList",
            "groupVersion": version,
            "resources": [
                {"name": name, "singularName": "", "namespaced": True, "kind": kind, "verbs": ["get", "list"]}
                for name, kind in kinds
            ],
        }
        for each in objects:
            for name, kind in kinds:
                if (each["apiVersion"], each["kind"]) == (version, kind):
                    meta = each["metadata"]
                    answers[f"{_root(version)}/namespaces/{meta['namespace']}/{name}/{meta['name']}"] = each

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"  # connections are used again
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            found = answers.get(self.path.partition("?")[0].rstrip("/"))
            missing = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}
            body = json.dumps(missing if found is None else found).encode()
            self.send_response(404 if found is None else 200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = _Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield write_kubeconfig(folder, f"http://127.0.0.1:{server.server_port}")
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Server(http.server.ThreadingHTTPServer):
    request_queue_size = 128  # Helm connects many times at once; what finds no room is sent again after a second


def write_kubeconfig(folder: Path, url: str) -> Path:
    """A kubeconfig for a server that asks for nothing."""
    file = folder / "kubeconfig"
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "fake",
        "clusters": [{"name": "fake", "cluster": {"server": url}}],
        "users": [{"name": "fake", "user": {}}],
        "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": "fake"}}],
    }
    file.write_text(yaml.safe_dump(content))
    return file


def _root(version: str) -> str:
    return f"/apis/{version}" if "/" in version else f"/api/{version}"
