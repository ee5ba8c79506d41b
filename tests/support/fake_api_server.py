"""An API server in memory, for Helm: what a chart looks up (`--dry-run=server`), and the life of a release.

It stores objects and knows nothing of their kinds: no defaults, no validation, no controllers. Lists are atomic, also
in a strategic merge patch. Server-side apply has owners of fields and conflicts as Kubernetes has them.
"""

from __future__ import annotations

import base64
import contextlib
import copy
import http.server
import itertools
import json
import threading
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
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
    "monitoring.coreos.com/v1alpha1": [("scrapeconfigs", "ScrapeConfig")],
    "networking.k8s.io/v1": [("networkpolicies", "NetworkPolicy")],
    "policy/v1": [("poddisruptionbudgets", "PodDisruptionBudget")],
    "ray.io/v1": [("rayservices", "RayService")],
    "rbac.authorization.k8s.io/v1": [("rolebindings", "RoleBinding"), ("roles", "Role")],
}
_VERBS = ["create", "delete", "get", "list", "patch", "update", "watch"]
_POLL_S = 0.1

Document = dict[str, Any]
Field = tuple[str, ...]


class ApiError(Exception):
    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code, self.reason = code, reason


class Store:
    """Objects by the path of their requests, and which manager set which of their fields."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.is_closed = False
        self.events: list[tuple[int, str, str, Document]] = []  # (version, type, path, object)
        self._path_to_object: dict[str, Document] = {}
        self._path_to_owners: dict[str, dict[str, set[Field]]] = {}
        self._versions = itertools.count(1)
        self._version = 0

    @property
    def version(self) -> str:
        return str(self._version)

    def add(self, document: Mapping[str, Any]) -> None:
        """Put an object with a namespace, as if it had always been there."""
        path = path_of(document["apiVersion"], document["kind"], **_names(document))
        self._put(path, copy.deepcopy(dict(document)))

    def read(self, path: str) -> Document:
        with self.changed:
            if path not in self._path_to_object:
                raise ApiError(404, "NotFound", f"{path} not found")
            return copy.deepcopy(self._path_to_object[path])

    def below(self, folder: str, labels: Mapping[str, str], name: str = "") -> list[Document]:
        with self.changed:
            return [
                copy.deepcopy(each)
                for path, each in sorted(self._path_to_object.items())
                if path.rpartition("/")[0] == folder and _selects(each, labels, name)
            ]

    def create(self, folder: str, document: Document, manager: str) -> Document:
        path = f"{folder}/{document['metadata']['name']}"
        with self.changed:
            if path in self._path_to_object:
                raise ApiError(409, "AlreadyExists", f"{path} already exists")
            return self.update(path, document, manager)

    def update(self, path: str, document: Document, manager: str) -> Document:
        """The manager owns the fields that it changes, and nobody else does."""
        with self.changed:
            before, after = _fields(self._path_to_object.get(path, {})), _fields(document)
            fields = {field for field, value in after.items() if field not in before or before[field] != value}
            for owned in self._path_to_owners.get(path, {}).values():
                owned -= fields | (before.keys() - after.keys())
            self._path_to_owners.setdefault(path, {}).setdefault(manager, set()).update(fields)
            return self._put(path, document)

    def merge(self, path: str, patch: Mapping[str, Any], manager: str) -> Document:
        return self.update(path, _merged(self.read(path), patch), manager)

    def apply(self, path: str, applied: Document, manager: str, *, force: bool) -> Document:
        """Server-side apply. Raises ApiError for fields that another manager set to something else."""
        with self.changed:
            document = copy.deepcopy(self._path_to_object.get(path, {}))
            live, fields = _fields(document), _fields(applied)
            owners = self._path_to_owners.setdefault(path, {})
            conflicts = [
                (other, field)
                for other, owned in owners.items()
                for field, value in fields.items()
                if other != manager and field in owned and live.get(field) != value
            ]
            if conflicts and not force:
                said = ", ".join(f'conflict with "{other}" using v1: .{".".join(field)}' for other, field in conflicts)
                raise ApiError(409, "Conflict", f"Apply failed with {len(conflicts)} conflict: {said}")
            for other, field in conflicts:
                owners[other].discard(field)
            dropped = owners.get(manager, set()) - fields.keys()
            owners[manager] = set(fields)
            for field in dropped - set().union(*owners.values()):
                _remove(document, field)
            return self._put(path, _merged(document, applied))

    def delete(self, path: str) -> Document:
        with self.changed:
            gone = self.read(path)
            del self._path_to_object[path]
            self._path_to_owners.pop(path, None)
            self._note("DELETED", path, gone)
            return gone

    def _put(self, path: str, document: Document) -> Document:
        with self.changed:
            kind = "MODIFIED" if path in self._path_to_object else "ADDED"
            self._path_to_object[path] = document
            self._note(kind, path, document)
            document["metadata"].setdefault("uid", f"uid-{self._version}")
            document["metadata"].setdefault("creationTimestamp", "2026-01-01T00:00:00Z")
            return copy.deepcopy(document)

    def _note(self, kind: str, path: str, document: Document) -> None:
        self._version = next(self._versions)
        document["metadata"]["resourceVersion"] = self.version
        self.events.append((self._version, kind, path, document))
        self.changed.notify_all()

    def close(self) -> None:
        with self.changed:
            self.is_closed = True
            self.changed.notify_all()


class ApiServer:
    """What a test sees of a server, as `kubectl` would."""

    def __init__(self, store: Store, kubeconfig: Path, namespace: str) -> None:
        self.kubeconfig = kubeconfig
        self._store = store
        self._namespace = namespace

    def secrets(self) -> dict[str, dict[str, str]]:
        """Name -> data, without those in which Helm stores releases."""
        found = self._store.below(path_of("v1", "Secret", self._namespace), {})
        return {each["metadata"]["name"]: each["data"] for each in found if each.get("type") != "helm.sh/release.v1"}

    def delete_secret(self, name: str) -> None:
        self._store.delete(path_of("v1", "Secret", self._namespace, name))

    def edit_secret(self, name: str, data: Mapping[str, str]) -> None:
        """`kubectl edit`."""
        self._store.merge(path_of("v1", "Secret", self._namespace, name), {"data": dict(data)}, "kubectl-edit")


@contextlib.contextmanager
def api_server(objects: Sequence[Document], folder: Path) -> Iterator[Path]:
    """Serves objects, which have namespaces, on loopback. Yields the path of a kubeconfig."""
    with release_server(objects, folder, "") as server:
        yield server.kubeconfig


@contextlib.contextmanager
def release_server(objects: Sequence[Document], folder: Path, namespace: str) -> Iterator[ApiServer]:
    """Serves a namespace in which releases can be installed."""
    store = Store()
    for each in objects:
        store.add(each)

    class Handler(_Handler):
        pass

    Handler.store = store
    server = _Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield ApiServer(store, write_kubeconfig(folder, f"http://127.0.0.1:{server.server_port}"), namespace)
    finally:
        store.close()
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # connections are used again
    disable_nagle_algorithm = True
    store: Store

    def do_GET(self) -> None:
        path, query = self._asked()
        if (found := _DISCOVERY.get(path)) is not None:
            self._send(200, found)
        elif path == "/openapi/v2":  # in protobuf, an empty document: nothing to validate by
            self._send_bytes(200, b"")
        elif path.rpartition("/")[2] not in _PLURAL_TO_KIND:
            self._answer(lambda: self.store.read(path))
        elif query.get("watch") in ("1", "true"):
            self._watch(path, query)
        else:
            version, kind = _PLURAL_TO_KIND[path.rpartition("/")[2]]
            items = self.store.below(path, *_selectors(query))
            meta = {"resourceVersion": self.store.version}
            self._send(200, {"apiVersion": version, "kind": f"{kind}List", "metadata": meta, "items": items})

    def do_POST(self) -> None:
        path, query = self._asked()
        document = self._body()
        self._answer(lambda: self.store.create(path, document, query.get("fieldManager", "helm")), 201)

    def do_PUT(self) -> None:
        path, query = self._asked()
        document = self._body()
        self._answer(lambda: self.store.update(path, document, query.get("fieldManager", "helm")))

    def do_PATCH(self) -> None:
        path, query = self._asked()
        patch, manager = self._body(), query.get("fieldManager", "helm")
        if "apply-patch" in self.headers["content-type"]:
            self._answer(lambda: self.store.apply(path, patch, manager, force=query.get("force") == "true"))
        else:
            self._answer(lambda: self.store.merge(path, patch, manager))

    def do_DELETE(self) -> None:
        path, _ = self._asked()
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self._answer(lambda: self.store.delete(path))

    def _asked(self) -> tuple[str, dict[str, str]]:
        url = urllib.parse.urlsplit(self.path)
        return url.path.rstrip("/"), dict(urllib.parse.parse_qsl(url.query))

    def _body(self) -> Any:
        content = self.rfile.read(int(self.headers.get("content-length", 0)))
        if content.startswith(_PROTOBUF):  # releases, which Helm stores with Kubernetes' typed client
            return _secret(content)
        # Of server-side apply it may be YAML.
        return json.loads(content) if content[:1] in (b"{", b"[") else yaml.safe_load(content)

    def _answer(self, act: Any, code: int = 200) -> None:
        try:
            self._send(code, act())
        except ApiError as error:
            status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "metadata": {}}
            self._send(error.code, {**status, "reason": error.reason, "message": str(error), "code": error.code})

    def _send(self, code: int, content: Any) -> None:
        self._send_bytes(code, json.dumps(content).encode())

    def _send_bytes(self, code: int, body: bytes) -> None:
        self.send_response(code)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _watch(self, folder: str, query: Mapping[str, str]) -> None:
        store = self.store
        if query.get("sendInitialEvents") == "true":  # clients then list first
            self._answer(lambda: _raise(ApiError(422, "Invalid", "sendInitialEvents is forbidden")))
            return
        selectors = _selectors(query)
        seen = int(query.get("resourceVersion") or 0)
        self.close_connection = True
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("connection", "close")
        self.end_headers()
        with contextlib.suppress(OSError):
            while True:
                with store.changed:
                    while not store.is_closed and store.events[-1:] and store.events[-1][0] <= seen:
                        store.changed.wait(_POLL_S)
                    if store.is_closed:
                        return
                    fresh = [copy.deepcopy(each) for each in store.events if each[0] > seen]
                for version, kind, path, document in fresh:
                    seen = version
                    if path.rpartition("/")[0] == folder and _selects(document, *selectors):
                        self.wfile.write(json.dumps({"type": kind, "object": document}).encode() + b"\n")
                self.wfile.flush()

    def log_message(self, format: str, *args: Any) -> None:
        pass


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


def path_of(version: str, kind: str, namespace: str, name: str = "") -> str:
    plural = next(plural for plural, known in _KINDS[version] if known == kind)
    return f"{_root(version)}/namespaces/{namespace}/{plural}{f'/{name}' if name else ''}"


def _root(version: str) -> str:
    return f"/apis/{version}" if "/" in version else f"/api/{version}"


def _names(document: Mapping[str, Any]) -> dict[str, str]:
    return {key: document["metadata"][key] for key in ("namespace", "name")}


def _raise(error: Exception) -> None:
    raise error


def _discovery() -> dict[str, Document]:
    """Path -> what the server says of its kinds."""
    groups = [
        {
            "name": version.partition("/")[0],
            "versions": [{"groupVersion": version, "version": version.partition("/")[2]}],
            "preferredVersion": {"groupVersion": version, "version": version.partition("/")[2]},
        }
        for version in _KINDS
        if "/" in version
    ]
    answers: dict[str, Document] = {
        "/version": {"major": "1", "minor": "36", "gitVersion": "v1.36.2"},
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
        "/apis": {"kind": "APIGroupList", "groups": groups},
    }
    for version, kinds in _KINDS.items():
        resources = [
            {"name": name, "singularName": "", "namespaced": True, "kind": kind, "verbs": _VERBS}
            for name, kind in kinds
        ]
        answers[_root(version)] = {"kind": "APIResourceList", "groupVersion": version, "resources": resources}
    return answers


_DISCOVERY = _discovery()
_PLURAL_TO_KIND = {plural: (version, kind) for version, kinds in _KINDS.items() for plural, kind in kinds}


_PROTOBUF = b"k8s\x00"


def _secret(content: bytes) -> Document:
    """Decode a Secret, with the numbers of fields of k8s.io/api/core/v1/generated.proto."""
    (raw,) = _messages(content[len(_PROTOBUF) :])[2]
    secret = _messages(raw)
    meta = _messages(secret[1][0])

    def entries(values: Sequence[bytes]) -> dict[str, bytes]:
        pairs = [_messages(each) for each in values]
        return {pair[1][0].decode(): pair.get(2, [b""])[0] for pair in pairs}

    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": meta[1][0].decode(),
            "labels": {key: value.decode() for key, value in entries(meta.get(11, [])).items()},
        },
        "type": secret[3][0].decode(),
        "data": {key: base64.b64encode(value).decode() for key, value in entries(secret.get(2, [])).items()},
    }


def _messages(content: bytes) -> dict[int, list[bytes]]:
    """Number of each field with a length -> its values. Numbers (varints) are skipped."""
    found: dict[int, list[bytes]] = {}
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = content[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(content):
        number, kind = divmod(varint(), 8)
        length = varint()
        if kind == 2:
            found.setdefault(number, []).append(content[at : at + length])
            at += length
    return found


def _selectors(query: Mapping[str, str]) -> tuple[dict[str, str], str]:
    """The labels that are asked for, and the name."""
    labels = dict(each.split("=", 1) for each in query.get("labelSelector", "").split(",") if each)
    return labels, query.get("fieldSelector", "").partition("metadata.name=")[2]


def _selects(document: Mapping[str, Any], labels: Mapping[str, str], name: str = "") -> bool:
    meta = document["metadata"]
    return labels.items() <= (meta.get("labels") or {}).items() and name in ("", meta["name"])


def _fields(document: Mapping[str, Any], above: Field = ()) -> dict[Field, Any]:
    """Path of each field that a manager can own -> its value."""
    found: dict[Field, Any] = {}
    for key, value in document.items():
        field = (*above, key)
        if field in _IDENTITY:
            continue
        if isinstance(value, dict) and value:
            found |= _fields(value, field)
        else:
            found[field] = value
    return found


_IDENTITY = {
    ("apiVersion",),
    ("kind",),
    *(
        ("metadata", key)
        for key in ("name", "namespace", "uid", "resourceVersion", "creationTimestamp", "managedFields")
    ),
}


def _merged(document: Mapping[str, Any], patch: Mapping[str, Any]) -> Document:
    result = copy.deepcopy(dict(document))
    for key, value in patch.items():
        if key.startswith("$"):  # of a strategic merge patch
            continue
        if value is None:
            result.pop(key, None)
        elif isinstance(value, dict):
            result[key] = _merged(result[key] if isinstance(result.get(key), dict) else {}, value)
        else:
            result[key] = copy.deepcopy(value)
    return result


def _remove(document: Document, field: Field) -> None:
    *above, last = field
    here: Any = document
    for key in above:
        here = here.get(key) if isinstance(here, dict) else None
    if isinstance(here, dict):
        here.pop(last, None)
