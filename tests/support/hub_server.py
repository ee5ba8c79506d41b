"""A server with the endpoints of the hub that huggingface_hub uses, which can fail on demand. On loopback."""

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
    lists_no_sizes: bool = False
    has_etags: bool = True
    xet_hash: str = ""  # of large files, which then may be asked for over Xet
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

    def tree(self) -> Any:
        """Return the files as the hub lists them."""
        if self.listing is not None:
            return self.listing
        found = []
        for path, content in self.files.items():
            blob = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
            entry: dict[str, Any] = {"type": "file", "path": path, "size": len(content), "oid": blob}
            if len(content) >= LFS_FROM_BYTES:
                entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
            if self.lists_no_sizes:
                entry["size"] = None
            found.append(entry)
        return found


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or each body waits 40 ms for the client to acknowledge its head
    hub: Hub
    about_file: dict[str, str]  # headers of answers with a file, or about one

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._respond()

    def do_GET(self) -> None:
        hub = self.hub
        hub.requests.append((self.path, {key.lower(): value for key, value in self.headers.items()}))
        self._respond()

    def _respond(self) -> None:
        hub, url = self.hub, urlsplit(self.path)
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
            self.about_file = {}
            self._file(unquote(url.path.removeprefix("/elsewhere/")))
        elif hub.token and self.headers.get("authorization") != f"Bearer {hub.token}":
            self._answer(401, b"", {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})
        elif listed := re.fullmatch(rf"/api/models/{MODEL}/revision/(.+)", url.path):
            commit = hub.revisions.get(unquote(listed[1]))
            if commit is None:
                self._answer(404, b"", {"X-Error-Code": "RevisionNotFound"})
            else:
                body = {"_id": "1", "id": MODEL, "modelId": MODEL, "sha": commit, "siblings": []}
                self._answer(200, json.dumps(body).encode(), {"Content-Type": "application/json"})
        elif url.path == f"/api/models/{MODEL}/tree/{COMMIT}":
            if hub.listing_chunks is not None:
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
                self._answer(200, json.dumps(hub.tree()).encode(), {"Content-Type": "application/json"})
        elif found := re.fullmatch(rf"/{MODEL}/resolve/{COMMIT}/(.+)", url.path):
            path = unquote(found[1])
            if path not in hub.files:
                self._answer(404, b"", {"X-Error-Code": "EntryNotFound"})
                return
            etag = {"ETag": f'"{hashlib.sha256(hub.files[path]).hexdigest()}"'} if hub.has_etags else {}
            self.about_file = {"X-Repo-Commit": COMMIT, **etag}
            if hub.xet_hash and len(hub.files[path]) >= LFS_FROM_BYTES:
                self.about_file |= {"X-Xet-Hash": hub.xet_hash, "X-Xet-Refresh-Route": f"{hub.url}/xet"}
            if hub.elsewhere_port and len(hub.files[path]) >= LFS_FROM_BYTES:
                location = f"http://localhost:{hub.elsewhere_port}/elsewhere/{found[1]}"
                linked = {f"X-Linked-{key}": value for key, value in etag.items()}
                size = {"X-Linked-Size": str(len(hub.files[path]))}
                self._answer(302, b"", {"Location": location, "X-Repo-Commit": COMMIT, **size, **linked})
            else:
                self._file(path)
        else:
            self._answer(404, b"", {"X-Error-Code": "RepoNotFound"})

    def _file(self, path: str) -> None:
        hub = self.hub
        content = gzip.compress(hub.files[path]) if hub.encoding == "gzip" else hub.files[path]
        if path in hub.wrong:
            content = bytes(len(content))
        start, status, headers = 0, 200, dict(self.about_file)
        if self.command == "HEAD":
            self._answer(200, content, headers)
            return
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
        if self.command != "HEAD":
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
