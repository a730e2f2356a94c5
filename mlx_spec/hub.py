"""From a model's name to a folder on this machine: a path, a model already pulled, or a hub id.

A complete copy is used without one request. A hub id that is not here is looked at first (one request for names and
sizes, one for config.json), then fetched by huggingface_hub, which keeps finished files. Every failure is one sentence
that never holds a token. Reads no environment (huggingface_hub reads its own); knows no alias, imports no mlx.
"""

from __future__ import annotations

import errno
import fcntl
import fnmatch
import logging
import shutil
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import platformdirs
from huggingface_hub import HfApi, constants, get_token, hf_hub_download, snapshot_download, try_to_load_from_cache
from huggingface_hub import errors as hub_errors
from huggingface_hub.utils import httpx  # type: ignore[attr-defined]  # its own HTTP client, whatever that is called
from huggingface_hub.utils import tqdm as hub_bar  # type: ignore[attr-defined]

from mlx_spec.errors import CheckpointError, MlxSpecError, ModelNotFoundError, OfflineError, ResourceError
from mlx_spec.folders import (
    FolderInfo,
    check_config,
    check_drafter,
    check_folder,
    check_target,
    drafter_format,
    parse_config,
    refuse_drafter,
    refuse_target,
)

# mlx-lm's own, so that its cached snapshots and ours are one and the same.
PATTERNS = (
    "*.json",
    "model*.safetensors",
    "*.py",
    "tokenizer.model",
    "*.tiktoken",
    "tiktoken.model",
    "*.txt",
    "*.jsonl",
    "*.jinja",
)
TIMEOUT = 5.0  # seconds until a hub that does not answer counts as out of reach
PAUSE = 0.2  # seconds between two tries of a lock

Progress = Callable[[int, int], None]  # (bytes on disk, bytes in total) of this download
Check = Callable[[Mapping[str, Any]], None]  # raises what is wrong with a config.json, before weights are fetched


Waiting = Callable[[str], None]  # gets a sentence once, when another program holds what is needed

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Remote:
    """A hub repository that was looked at: what ``fetch`` would bring."""

    name: str
    revision: str | None  # as asked for
    commit: str
    sizes: Mapping[str, int]  # bytes by file name; only what is wanted and not yet here
    config: Mapping[str, Any]

    @property
    def size(self) -> int:
        return sum(self.sizes.values())


def models_dir() -> Path:
    """Where pulled models are kept, one folder a name. It need not exist."""
    return platformdirs.user_data_path("mlx-spec", appauthor=False) / "models"


def resolve(
    name: str | Path,
    revision: str | None = None,
    download: bool = True,
    progress: Progress | None = None,
    check: Check | None = None,
) -> Path:
    """The folder of a model: a local path, the name of a pulled model, or a hub id (``revision``: its branch, tag or
    commit), fetched where ``download`` allows it.

    ``progress`` replaces huggingface_hub's own bars. ``check`` sees config.json before any weights are fetched.
    Raises ModelNotFoundError, OfflineError, CheckpointError, ResourceError, and what ``check`` raises.
    """
    found = local(name, revision)
    if found is not None:
        return found
    if not download:
        raise OfflineError(f"{name} is not on this machine; allow its download, or name a folder")
    return fetch(look(str(name), revision, check), progress)


def local(name: str | Path, revision: str | None = None) -> Path | None:
    """The folder of a model that is complete on this machine, without any request; None if it has to be fetched.

    Raises ModelNotFoundError for a path that does not exist and for a name that can be neither path nor hub id.
    """
    text = str(name)
    try:
        path = Path(name).expanduser()
    except RuntimeError as error:  # ~name of nobody here
        raise ModelNotFoundError(f"there is no home folder for {text}; write the path out") from error
    if path.is_dir():
        return path
    if path.exists():
        raise ModelNotFoundError(f"{text} is a file; give a folder, a hub id, or the name of a pulled model")
    if path.is_absolute() or text.startswith((".", "~")) or text.count("/") > 1:
        raise ModelNotFoundError(f"there is no folder {text}; check the path, or give a hub id (owner/name)")
    pulled = models_dir() / text
    if "/" not in text and (pulled / "config.json").is_file():
        return pulled
    return _cached(text, revision)


def _cached(name: str, revision: str | None) -> Path | None:
    try:
        folder = snapshot_download(name, revision=revision, allow_patterns=list(PATTERNS), local_files_only=True)
        check_folder(folder)  # an old cache keeps no list of what belongs to a snapshot
    except hub_errors.HFValidationError as error:
        raise explain(error, name) from error
    except (hub_errors.LocalEntryNotFoundError, CheckpointError):
        return None
    return Path(folder)


def look(name: str, revision: str | None = None, check: Check | None = None) -> Remote:
    """Names, sizes and config.json of a hub repository; fetches no weights. Raises as ``resolve`` does."""
    try:
        info = HfApi().model_info(name, revision=revision, timeout=TIMEOUT, files_metadata=True)
        files = {file.rfilename: file.size or 0 for file in info.siblings or ()}
        _refuse_contents(name, files)
        commit = info.sha or revision or constants.DEFAULT_REVISION
        path = hf_hub_download(name, "config.json", revision=commit, etag_timeout=TIMEOUT, tqdm_class=_bar(None))
    except (OSError, ValueError, httpx.HTTPError) as error:
        raise explain(error, name, revision) from error
    config = parse_config(Path(path))
    check_config(config, name)
    if check is not None:
        check(config)
    wanted = {file: size for file, size in files.items() if any(fnmatch.fnmatch(file, glob) for glob in PATTERNS)}
    here = {file for file in wanted if isinstance(try_to_load_from_cache(name, file, revision=commit), str)}
    return Remote(name, revision, commit, {file: size for file, size in wanted.items() if file not in here}, config)


def fetch(remote: Remote, progress: Progress | None = None, waiting: Waiting = _log.warning) -> Path:
    """Bring a repository that ``look`` saw into huggingface_hub's cache; the snapshot's folder, checked."""
    _wait_for_others(remote.name, waiting)
    refuse_full(Path(constants.HF_HUB_CACHE), remote.size, remote.name)
    bar = None if progress is None else _bar(lambda done: progress(min(done, remote.size), remote.size))
    try:
        folder = snapshot_download(
            remote.name, revision=remote.revision, allow_patterns=list(PATTERNS), tqdm_class=bar, etag_timeout=TIMEOUT
        )
    except (OSError, ValueError, httpx.HTTPError) as error:
        raise explain(error, remote.name, remote.revision, begun=True) from error
    check_folder(folder)
    return Path(folder)


def _wait_for_others(name: str, waiting: Waiting) -> None:
    """Until nobody else fetches this repository. huggingface_hub would wait too, but in threads of its own: silently,
    and deaf to Ctrl-C."""
    folder = Path(constants.HF_HUB_CACHE) / ".locks" / f"models--{name.replace('/', '--')}"
    for path in sorted(folder.glob("*.lock")):
        told = False
        with path.open("r+") as file:
            while not _free(file):
                if not told:
                    waiting(f"waiting for another program that is fetching {name} (lock {path})")
                told = True
                time.sleep(PAUSE)


def _free(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(file, fcntl.LOCK_UN)
    return True


def refuse_full(place: Path, needed: int, what: str) -> None:
    """ResourceError with both numbers where the disk of ``place`` lacks ``needed`` bytes."""
    folder = next(parent for parent in (place, *place.absolute().parents) if parent.exists())
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ResourceError(
            f"{what} needs {needed / 1e9:.2f} GB and the disk of {folder} has {free / 1e9:.2f} GB free; make room"
        )


def _refuse_contents(name: str, files: Mapping[str, int]) -> None:
    """A repository without what mlx-lm reads is told by its file names alone."""
    if "config.json" not in files:
        other = "GGUF files only" if any(file.endswith(".gguf") for file in files) else "no config.json"
        raise CheckpointError(f"{name} holds {other}, so it is not a model for MLX; look for its mlx-community twin")
    if not any(fnmatch.fnmatch(file, "model*.safetensors") for file in files):
        raise CheckpointError(f"{name} holds no model*.safetensors weights; look for its mlx-community twin")


def _bar(report: Callable[[int], None] | None) -> type[hub_bar]:
    """A bar class that draws nothing and reports bytes. huggingface_hub opens several for one download: received and
    written bytes run side by side, so the larger count is the progress."""
    counts: dict[int, float] = {}

    class Bar(hub_bar):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._counts = kwargs.get("unit") == "B" and report is not None
            super().__init__(*args, **{**kwargs, "disable": True})  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> bool | None:
            if self._counts and report is not None:
                counts[id(self)] = counts.get(id(self), 0) + (n or 0)
                report(int(max(counts.values())))
            return None

    return Bar


def explain(error: Exception, name: str, revision: str | None = None, begun: bool = False) -> MlxSpecError:
    """The sentence for a failure of huggingface_hub. ``begun``: files were being fetched, finished ones are kept."""
    if isinstance(error, MlxSpecError):
        return error
    chain = list(_causes(error))
    for link in chain:
        if isinstance(link, hub_errors.HfHubHTTPError):
            return _refused(link, name, revision)
    if isinstance(error, (hub_errors.HFValidationError, hub_errors.HfUriError)):
        return ModelNotFoundError(f"{name!r} is neither a folder here nor a hub id (owner/name); check the spelling")
    if any(isinstance(link, ssl.SSLError) or "CERTIFICATE_VERIFY_FAILED" in str(link) for link in chain):
        return OfflineError(
            f"{name} is not on this machine and the hub's certificate was not accepted (TLS); "
            "check the system clock, or give the proxy's certificate in SSL_CERT_FILE"
        )
    if any(isinstance(link, OSError) and link.errno in (errno.ENOSPC, errno.EDQUOT) for link in chain):
        return ResourceError(f"the disk filled up while {name} was fetched; make room and run it again")
    if isinstance(error, PermissionError):
        return ResourceError(f"{name} cannot be kept: {error.filename} may not be written; see to its permissions")
    if "onsistency check failed" in str(error):
        return CheckpointError(f"a file of {name} arrived with a wrong size and was dropped; run it again")
    if any(isinstance(link, hub_errors.OfflineModeIsEnabled) for link in chain):
        return OfflineError(f"{name} is not on this machine and offline mode is on (HF_HUB_OFFLINE); unset it to fetch")
    if any(isinstance(link, httpx.LocalProtocolError) for link in chain):
        return ModelNotFoundError("your hub token has characters that cannot be sent; log in again: `hf auth login`")
    if isinstance(error, (ValueError, hub_errors.FileMetadataError)):
        return OfflineError(f"{name}: what answered is not the hub; see to the network's login page, or HF_ENDPOINT")
    if begun:
        rest = "run it again, finished files are kept"
        return OfflineError(f"the connection to the hub broke off while {name} was fetched; {rest}")
    other = "name a folder here" if "/" in name else f"bring it with `mlx-spec models pull {name}`"
    return OfflineError(f"{name} is not on this machine and the hub cannot be reached; connect, or {other}")


def _refused(error: hub_errors.HfHubHTTPError, name: str, revision: str | None) -> MlxSpecError:
    """An answer of the hub that is not the file."""
    status = error.response.status_code
    known = get_token() is not None
    login = "" if known else ", or log in with `hf auth login`"
    if isinstance(error, hub_errors.GatedRepoError):
        return ModelNotFoundError(f"{name} is gated ({status}): accept its terms on its page at the hub{login}")
    if isinstance(error, hub_errors.RevisionNotFoundError):
        return ModelNotFoundError(f"{name} has no revision {revision!r}; check the branch, tag or commit")
    if isinstance(error, hub_errors.RepositoryNotFoundError) or (status == 401 and not known):
        return ModelNotFoundError(f"the hub has no {name}, or it is private ({status}); check the spelling{login}")
    if status == 401:
        return ModelNotFoundError(f"the hub does not accept your token for {name} (401); log in again: `hf auth login`")
    if status in (403, 451):
        return ModelNotFoundError(f"the hub refuses access to {name} ({status}); your token does not allow it{login}")
    if status == 429:
        return OfflineError(f"the hub refuses {name} for now: too many requests (429); wait a few minutes{login}")
    if status >= 500:
        return OfflineError(f"{name} is not on this machine and the hub is out of order ({status}); try again later")
    return ModelNotFoundError(f"the hub does not give {name} ({status}); check the spelling")


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


__all__ = [
    "Check",
    "FolderInfo",
    "Progress",
    "Remote",
    "check_config",
    "check_drafter",
    "check_folder",
    "check_target",
    "drafter_format",
    "explain",
    "fetch",
    "local",
    "look",
    "models_dir",
    "refuse_drafter",
    "refuse_full",
    "refuse_target",
    "resolve",
]
