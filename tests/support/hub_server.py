"""A server with the hub's two endpoints that a download uses, which can fail on demand. On loopback."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee" + "0" * 34
MODEL = "acme/tiny"
LFS_FROM_BYTES = 1000  # larger files have a SHA-256 of their own, as with Git LFS


@dataclass
class Hub:
    files: dict[str, bytes]
    revisions: Mapping[str, str] = field(default_factory=lambda: {"main": COMMIT, "v1": COMMIT, COMMIT: COMMIT})
    token: str = ""  # that clients need
    port: int = 0
    elsewhere_port: int = 0  # of the host to which large files are redirected
    cut_after_bytes: int | None = None  # of each answer with a file
    cut_more_bytes: tuple[int, ...] = (0,)  # than that, in turn
    num_cuts: int | None = None  # answers that are cut; None: all
    retry_after: str = ""  # of such answers
    num_unavailable: int = 0  # answers that are 503 before the first that is not
    num_pages: int = 0  # answers that are an HTML page before the first that is not, as of a proxy
    page_status: int = 200
    num_elsewhere_refused: int = 0  # answers of the other host that are 403, as of an address that has expired
    refusal: tuple[int, str] | None = None  # status and X-Error-Code of every answer
    listing: Any = None  # instead of the files' own
    listing_chunks: Iterable[bytes] | None = None  # instead of the whole answer with a listing
    listing_encoding: str = ""  # Content-Encoding that it claims
    listed: Callable[[], None] = lambda: None  # called before an answer with a listing
    cut: Callable[[], None] = lambda: None  # called before an answer that is cut
    wrong: set[str] = field(default_factory=set)  # paths with other bytes than listed
    ignores_ranges: bool = False
    encoding: str = ""  # Content-Encoding of files
    gate: threading.Event | None = None  # answers with files stop half way until it is set
    requests: list[tuple[str, Mapping[str, str]]] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def num_gets(self, path: str) -> int:
        return sum(f"/resolve/{COMMIT}/{path}" in url for url, _ in self.requests)

    def siblings(self) -> Any:
        if self.listing is not None:
            return self.listing
        found = []
        for path, content in self.files.items():
            blob = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
            entry: dict[str, Any] = {"rfilename": path, "size": len(content), "blobId": blob}
            if len(content) >= LFS_FROM_BYTES:
                sha256 = hashlib.sha256(content).hexdigest()
                entry["lfs"] = {"sha256": sha256, "size": len(content), "pointerSize": 134}
            found.append(entry)
        return found

    def tree(self) -> list[dict[str, Any]]:
        """Return the list that huggingface_hub asks for."""
        return [
            {
                "type": "file",
                "path": path,
                "size": len(content),
                "oid": hashlib.sha1(content, usedforsecurity=False).hexdigest(),
            }
            for path, content in self.files.items()
        ]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or each body waits 40 ms for the client to acknowledge its head
    hub: Hub

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        """Answer as the hub does what huggingface_hub asks before it downloads a file."""
        found = re.fullmatch(rf"/{MODEL}/resolve/{COMMIT}/(.+)", urlsplit(self.path).path)
        content = self.hub.files.get(unquote(found[1])) if found else None
        self.send_response(404 if content is None else 200)
        if content is not None:
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("Content-Length", str(len(content or b"")))
        self.end_headers()

    def do_GET(self) -> None:
        hub, url = self.hub, urlsplit(self.path)
        hub.requests.append((self.path, {key.lower(): value for key, value in self.headers.items()}))
        if hub.num_unavailable > 0:
            hub.num_unavailable -= 1
            self._answer(503, b"", {"Retry-After": hub.retry_after} if hub.retry_after else None)
        elif hub.num_pages > 0:
            hub.num_pages -= 1
            page = b"<html>Log in to go on"
            self._answer(hub.page_status, page, {"Content-Type": "text/html; charset=utf-8"})
        elif hub.refusal is not None:
            self._answer(hub.refusal[0], b"no", {"X-Error-Code": hub.refusal[1], "Content-Type": "text/plain"})
        elif url.path.startswith("/elsewhere/") and hub.num_elsewhere_refused > 0:
            hub.num_elsewhere_refused -= 1
            self._answer(403, b"<Error/>", {"Content-Type": "application/xml"})
        elif url.path.startswith("/elsewhere/"):
            self._file(unquote(url.path.removeprefix("/elsewhere/")))
        elif hub.token and self.headers.get("authorization") != f"Bearer {hub.token}":
            self._answer(401, b"", {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})
        elif listed := re.fullmatch(rf"/api/models/{MODEL}/revision/(.+)", url.path):
            commit = hub.revisions.get(unquote(listed[1]))
            if commit is None:
                self._answer(404, b"", {"X-Error-Code": "RevisionNotFound"})
            elif hub.listing_chunks is not None:
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                if hub.listing_encoding:
                    self.send_header("Content-Encoding", hub.listing_encoding)
                self.end_headers()
                for chunk in hub.listing_chunks:
                    self.wfile.write(chunk)
                self.close_connection = True
            else:
                hub.listed()
                body = {"_id": "1", "id": MODEL, "modelId": MODEL, "sha": commit, "siblings": hub.siblings()}
                self._answer(200, json.dumps(body).encode(), {"Content-Type": "application/json"})
        elif url.path == f"/api/models/{MODEL}/tree/{COMMIT}":
            self._answer(200, json.dumps(hub.tree()).encode(), {"Content-Type": "application/json"})
        elif found := re.fullmatch(rf"/{MODEL}/resolve/{COMMIT}/(.+)", url.path):
            path = unquote(found[1])
            if hub.elsewhere_port and len(hub.files[path]) >= LFS_FROM_BYTES:
                location = f"http://localhost:{hub.elsewhere_port}/elsewhere/{found[1]}"
                self._answer(302, b"", {"Location": location})
            else:
                self._file(path)
        else:
            self._answer(404, b"", {"X-Error-Code": "RepoNotFound"})

    def _file(self, path: str) -> None:
        hub = self.hub
        content = gzip.compress(hub.files[path]) if hub.encoding == "gzip" else hub.files[path]
        if path in hub.wrong:
            content = bytes(len(content))
        start, status, headers = 0, 200, {}
        if (wanted := re.fullmatch(r"bytes=(\d+)-", self.headers.get("range", ""))) and not hub.ignores_ranges:
            start, status = int(wanted[1]), 206
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        if hub.encoding:
            headers["Content-Encoding"] = hub.encoding
        rest = content[start:]
        cut = hub.cut_after_bytes
        if cut is not None:
            cut += hub.cut_more_bytes[len(hub.requests) % len(hub.cut_more_bytes)]
        if cut is not None and len(rest) > cut and hub.num_cuts != 0:
            if hub.num_cuts is not None:
                hub.num_cuts -= 1
            hub.cut()
            self._answer(status, rest[:cut], headers, num_bytes=len(rest))
            self.close_connection = True
        elif hub.gate is not None and len(rest) > 1:
            self._answer(status, rest[: len(rest) // 2], headers, num_bytes=len(rest))
            self.wfile.flush()
            hub.gate.wait(60)
            self.wfile.write(rest[len(rest) // 2 :])
        else:
            self._answer(status, rest, headers)

    def _answer(
        self, status: int, body: bytes, headers: Mapping[str, str] | None = None, *, num_bytes: int | None = None
    ) -> None:
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body) if num_bytes is None else num_bytes))
        self.end_headers()
        self.wfile.write(body)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # a client that was killed


@contextmanager
def hub_server(files: dict[str, bytes], **options: Any) -> Iterator[Hub]:
    hub = Hub(files, **options)
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = _Server(("127.0.0.1", 0), handler)
    hub.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        if hub.gate is not None:
            hub.gate.set()
        server.shutdown()
        server.server_close()
        thread.join()
