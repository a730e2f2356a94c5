"""A hub on the loopback: as much of its API as fetching a model uses, with faults on demand. No test of its own."""

from __future__ import annotations

import hashlib
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants


def commit_of(name: str) -> str:
    """The one commit of a repository."""
    return hashlib.sha1(name.encode()).hexdigest()


@dataclass
class Repo:
    files: dict[str, bytes]
    status: int = 200  # of every answer
    code: str | None = None  # X-Error-Code of a refusal
    claimed: dict[str, int] = field(default_factory=dict)  # sizes told by the API, where they are not the true ones
    short: set[str] = field(default_factory=set)  # files whose body comes with its last bytes missing


class Hub:
    """Repositories by id, and every request that came, as "METHOD path"."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.requests: list[str] = []
        self.url = ""

    def add(self, name: str, source: Path | dict[str, bytes], **faults: Any) -> Repo:
        files = (
            source if isinstance(source, dict) else {p.name: p.read_bytes() for p in source.iterdir() if p.is_file()}
        )
        self.repos[name] = Repo(dict(files), **faults)
        return self.repos[name]

    def asked_for(self, text: str) -> int:
        return sum(text in request for request in self.requests)

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes, int]:
        """(status, headers, body, length of the whole file)."""
        parts = unquote(urlsplit(path).path).strip("/").split("/")
        api = parts[:2] == ["api", "models"]
        parts = parts[2:] if api else parts
        name = "/".join(parts[:2])
        repo, commit = self.repos.get(name), commit_of(name)
        if repo is None:
            return 404, {"X-Error-Code": "RepoNotFound"}, b"{}", 2
        if repo.status != 200:
            return repo.status, {"X-Error-Code": repo.code} if repo.code else {}, b"{}", 2
        rest = parts[2:]
        if rest[:1] == ["revision"] and rest[1] not in ("main", commit):
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}", 2
        if api:
            value = self._tree(repo) if rest[:1] == ["tree"] else self._info(name, repo)
            body = json.dumps(value).encode()
            return 200, {"Content-Type": "application/json"}, body, len(body)
        file = "/".join(rest[2:])
        if file not in repo.files:
            return 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit}, b"", 0
        whole = repo.files[file]
        tag = hashlib.sha1(whole).hexdigest()
        return (
            200,
            {"ETag": f'"{tag}"', "X-Repo-Commit": commit},
            whole[:-9] if file in repo.short else whole,
            len(whole),
        )

    def _info(self, name: str, repo: Repo) -> dict[str, Any]:
        sizes = [{"rfilename": file, "size": repo.claimed.get(file, len(body))} for file, body in repo.files.items()]
        return {"id": name, "modelId": name, "sha": commit_of(name), "siblings": sizes, "tags": [], "private": False}

    def _tree(self, repo: Repo) -> list[dict[str, Any]]:
        return [
            {"type": "file", "path": file, "size": len(body), "oid": hashlib.sha1(body).hexdigest()}
            for file, body in repo.files.items()
        ]


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._reply(body=False)

        def do_GET(self) -> None:
            self._reply(body=True)

        def _reply(self, body: bool) -> None:
            hub.requests.append(f"{self.command} {self.path}")
            status, headers, data, length = hub.answer(self.path)
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data) if body else length))
            self.end_headers()
            if body:
                self.wfile.write(data)

        def log_message(self, *args: object) -> None:
            """Requests are kept in ``hub.requests``."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def point_at(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make ``url`` the hub of this process."""
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")


def start_afresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No cache, no token, nothing pulled."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))


def closed_port() -> str:
    """An address where nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"
