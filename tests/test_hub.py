"""Fetching from a hub that misbehaves in every way users have met. Nothing leaves the loopback."""

from __future__ import annotations

import fcntl
import json
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hub_mock import Hub, closed_port, commit_of, point_at, serving, start_afresh
from huggingface_hub import constants
from huggingface_hub.utils import httpx

from mlx_spec import hub
from mlx_spec.errors import (
    CheckpointError,
    MlxSpecError,
    ModelNotFoundError,
    OfflineError,
    PairError,
    ResourceError,
    UnsupportedError,
)
from mlx_spec.targets.skeleton import refuse_unsupported

TOKEN = "hf_" + "secretsecret"
WEIGHTS = "model.safetensors"


@pytest.fixture
def mock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_folder: Path) -> Iterator[Hub]:
    """A hub with ``owner/tiny``, and an empty cache."""
    start_afresh(tmp_path, monkeypatch)
    with serving(Hub()) as server:
        server.add("owner/tiny", tiny_folder)
        point_at(server.url, monkeypatch)
        yield server


def test_a_model_is_fetched_once_and_then_needs_no_request(mock: Hub, tiny_folder: Path) -> None:
    seen: list[tuple[int, int]] = []
    folder = hub.resolve("owner/tiny", progress=lambda done, total: seen.append((done, total)))
    assert (folder / WEIGHTS).read_bytes() == (tiny_folder / WEIGHTS).read_bytes()
    assert folder.name == commit_of("owner/tiny")
    assert seen[-1][0] == seen[-1][1] > (tiny_folder / WEIGHTS).stat().st_size
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    asked = len(mock.requests)
    assert hub.resolve("owner/tiny") == folder
    assert hub.resolve("owner/tiny", download=False) == folder
    assert len(mock.requests) == asked


def test_a_cached_model_is_used_without_any_network(mock: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = hub.resolve("owner/tiny")
    point_at(closed_port(), monkeypatch)
    assert hub.resolve("owner/tiny") == folder
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert hub.resolve("owner/tiny") == folder


REFUSALS = [
    ("owner/typo", {}, ModelNotFoundError, ("the hub has no owner/typo", "404", "spelling", "hf auth login")),
    ("owner/it", {"status": 401}, ModelNotFoundError, ("private (401)", "spelling", "hf auth login")),
    ("owner/it", {"status": 403, "code": "GatedRepo"}, ModelNotFoundError, ("gated", "accept its terms")),
    ("owner/it", {"status": 401, "code": "GatedRepo"}, ModelNotFoundError, ("gated", "accept its terms")),
    ("owner/it", {"status": 403}, ModelNotFoundError, ("refuses access", "403")),
    ("owner/it", {"status": 429}, OfflineError, ("too many requests",)),
    ("owner/it", {"status": 503}, OfflineError, ("out of order (503)", "try again later")),
    ("owner/it", {"status": 418}, ModelNotFoundError, ("418",)),
]


@pytest.mark.parametrize(("name", "faults", "kind", "words"), REFUSALS)
def test_each_refusal_has_its_own_sentence(
    name: str, faults: dict[str, object], kind: type[MlxSpecError], words: tuple[str, ...], mock: Hub, tiny_folder: Path
) -> None:
    if faults:
        mock.add(name, tiny_folder, **faults)
    with pytest.raises(ModelNotFoundError) as caught:
        hub.resolve(name)
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_no_sentence_holds_the_token(
    mock: Hub, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    mock.add("owner/it", tiny_folder, status=401, code=None)
    said = []
    for token in (TOKEN, TOKEN + "\n" + TOKEN):  # the second cannot even be sent
        monkeypatch.setenv("HF_TOKEN", token)
        for name in ("owner/it", "owner/typo"):
            with pytest.raises(ModelNotFoundError) as caught:
                hub.resolve(name)
            said.append(str(caught.value))
    assert "log in with" not in said[0], "a token is there, so logging in is not the next step"
    assert TOKEN not in "".join(said) + "".join(capfd.readouterr())


def test_out_of_reach(mock: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelNotFoundError, match="no revision 'v9'"):
        hub.resolve("owner/tiny", revision="v9")
    point_at(closed_port(), monkeypatch)
    with pytest.raises(OfflineError, match="owner/tiny is not on this machine and the hub cannot be reached"):
        hub.resolve("owner/tiny")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(OfflineError, match="not on this machine and offline mode is on"):
        hub.resolve("owner/tiny")
    with pytest.raises(OfflineError, match="not on this machine; allow its download"):
        hub.resolve("owner/tiny", download=False)


def test_a_certificate_is_not_a_missing_connection(mock: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    point_at(mock.url.replace("http:", "https:"), monkeypatch)  # a server that does not speak TLS
    with pytest.raises(OfflineError, match="certificate was not accepted"):
        hub.resolve("owner/tiny")
    refused = httpx.ConnectError("handshake")
    refused.__cause__ = ssl.SSLCertVerificationError(1, "certificate verify failed: self-signed certificate")
    assert "certificate was not accepted" in str(hub.explain(refused, "owner/tiny"))


@pytest.mark.parametrize("name", ["a b", "owner/na me", "-x/y", "a/..", "owner/n--m"])
def test_names_that_no_hub_has(name: str, mock: Hub) -> None:
    with pytest.raises(ModelNotFoundError, match="neither a folder here nor a hub id"):
        hub.resolve(name)
    assert not mock.requests


def test_paths(mock: Hub, tiny_folder: Path, tmp_path: Path) -> None:
    assert hub.resolve(tiny_folder) == tiny_folder
    for name in ("./nowhere", "/no/where", "~/no/where/at/all", "a/b/c"):
        with pytest.raises(ModelNotFoundError, match="no folder"):
            hub.resolve(name)
    with pytest.raises(ModelNotFoundError, match="is a file"):
        hub.resolve(tiny_folder / "config.json")
    pulled = hub.models_dir() / "mine"
    pulled.mkdir(parents=True)
    (pulled / "config.json").write_text("{}")
    assert hub.resolve("mine") == pulled
    assert not mock.requests


def test_the_config_is_read_before_weights_are_fetched(mock: Hub, tiny_folder: Path) -> None:
    """A model type that mlx-lm lacks, a drafter in a target's place, a cache that cannot roll back."""
    files = {p.name: p.read_bytes() for p in tiny_folder.iterdir()}
    config = json.loads(files["config.json"])
    cases: list[tuple[dict[str, object], type[MlxSpecError], str, hub.Check | None]] = [
        ({"model_type": "brand_new"}, UnsupportedError, "brand_new", None),
        ({"dflash_config": {}}, PairError, "--draft", lambda c: hub.refuse_drafter(c, "owner/x")),
        ({"model_type": "gpt_oss"}, UnsupportedError, "RotatingKVCache", lambda c: refuse_unsupported(c, "owner/x")),
    ]
    for number, (changes, kind, words, check) in enumerate(cases):
        mock.add(f"owner/x{number}", {**files, "config.json": json.dumps(config | changes).encode()})
        with pytest.raises(kind, match=words):
            hub.resolve(f"owner/x{number}", check=check)
    assert mock.asked_for("config.json")
    assert not mock.asked_for(WEIGHTS)


def test_a_repository_without_a_model(mock: Hub) -> None:
    mock.add("owner/gguf", {"model.Q4_1.gguf": b"GGUF", "README.md": b""})
    mock.add("owner/pickle", {"config.json": b'{"model_type": "llama"}', "pytorch_model.bin": b"x"})
    with pytest.raises(CheckpointError, match="GGUF files only"):
        hub.resolve("owner/gguf")
    with pytest.raises(CheckpointError, match=r"no model\*\.safetensors"):
        hub.resolve("owner/pickle")


def test_a_body_that_is_too_short_leaves_no_model_behind(mock: Hub, tiny_folder: Path) -> None:
    repo = mock.add("owner/cut", tiny_folder, short={WEIGHTS})
    with pytest.raises(CheckpointError, match="arrived with a wrong size and was dropped; run it again"):
        hub.resolve("owner/cut")
    assert hub.local("owner/cut") is None
    with pytest.raises(OfflineError):
        hub.resolve("owner/cut", download=False)
    repo.short.clear()
    path = f"GET /owner/cut/resolve/{commit_of('owner/cut')}"
    before = {name: mock.asked_for(f"{path}/{name}") for name in repo.files}
    assert (hub.resolve("owner/cut") / WEIGHTS).read_bytes() == repo.files[WEIGHTS]
    again = {name: mock.asked_for(f"{path}/{name}") - before[name] for name in repo.files}
    assert again[WEIGHTS] == 1
    finished = [name for name, count in before.items() if count and name != WEIGHTS]
    assert finished
    assert not any(again[name] for name in finished), "finished files are not fetched again"


def test_a_disk_that_is_too_small_is_told_before_the_weights(
    mock: Hub, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mock.add("owner/big", tiny_folder, claimed={WEIGHTS: 18_300_000_000})
    usage = hub.shutil.disk_usage("/")
    monkeypatch.setattr(hub.shutil, "disk_usage", lambda path: usage._replace(free=1_250_000_000))
    with pytest.raises(ResourceError, match=r"needs 18\.30 GB.*has 1\.25 GB free"):
        hub.resolve("owner/big")
    assert not mock.asked_for(WEIGHTS)


def test_something_else_answers(mock: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """A login page of a hotel: status 200, no JSON."""
    monkeypatch.setattr(mock, "answer", lambda path: (200, {"Content-Type": "text/html"}, b"<html>welcome", 13))
    with pytest.raises(OfflineError, match="not the hub"):
        hub.resolve("owner/tiny")


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (lambda: OSError(28, "No space left on device"), ResourceError),
        (lambda: PermissionError(13, "Permission denied", "/some/cache"), ResourceError),
        (lambda: httpx.ReadTimeout("slow"), OfflineError),
        (lambda: httpx.RemoteProtocolError("closed"), OfflineError),
    ],
)
def test_failures_while_fetching(fault: Callable[[], Exception], kind: type[MlxSpecError]) -> None:
    told = hub.explain(fault(), "owner/x", begun=True)
    assert type(told) is kind
    assert "owner/x" in str(told)


def test_the_mock_is_no_hub_that_always_agrees(mock: Hub) -> None:
    with pytest.raises(urllib.error.HTTPError):
        urllib.request.urlopen(f"{mock.url}/owner/tiny/resolve/main/absent.json")


INTERRUPTED = """
import os, signal, threading
from huggingface_hub import constants
from mlx_spec import hub
constants.HF_HUB_CACHE = {cache!r}
def waiting(text):
    print(text, flush=True)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    hub.fetch(hub.Remote("owner/tiny", None, "c", {{}}, {{}}), waiting=waiting)
except KeyboardInterrupt:
    print("interrupted")
"""


def test_another_program_fetches_the_same(mock: Hub, tmp_path: Path) -> None:
    """The wait is told, ends when the other ends, and hears Ctrl-C."""
    remote = hub.look("owner/tiny")
    path = Path(constants.HF_HUB_CACHE) / ".locks/models--owner--tiny/some.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    said: list[str] = []
    with path.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        script = INTERRUPTED.format(cache=constants.HF_HUB_CACHE)
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
        assert done.stdout.splitlines()[1:] == ["interrupted"], done.stderr
        assert f"waiting for another program that is fetching owner/tiny (lock {path})" in done.stdout

        def waiting(text: str) -> None:
            said.append(text)
            fcntl.flock(held, fcntl.LOCK_UN)

        assert hub.fetch(remote, waiting=waiting).is_dir()
    assert len(said) == 1
