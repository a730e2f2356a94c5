"""The corpus of the tiny pair: Python sources of the standard library, listed by name and hash in ``files.txt``.

``python corpus.py`` checks the library of the running interpreter against the list; ``python corpus.py --write`` makes
the list anew. Other scripts call ``texts``. Knows nothing of tokenizers and models.
"""

from __future__ import annotations

import hashlib
import sys
import sysconfig
from pathlib import Path

HERE = Path(__file__).resolve().parent
LIST = HERE / "files.txt"
HELD_OUT = HERE / "heldout.txt"
LIBRARY = Path(sysconfig.get_paths()["stdlib"])

TESTS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
# Data in the shape of a module: tables that would teach a small model to count.
TABLES = {"pydoc_data/topics.py", "html/entities.py", "lib2to3/pgen2/token.py", "stringprep.py"}
CHARMAPS = ("cp", "iso", "mac_", "koi8", "ptcp", "kz1048", "hp_roman", "tis_", "aliases")


def usable(name: str) -> bool:
    """Whether a library file (posix path below the library) is text to learn from."""
    parts = name.split("/")
    if TESTS & set(parts) or name in TABLES or parts[-1].startswith("_sysconfigdata"):
        return False
    return not (parts[0] == "encodings" and parts[-1].startswith(CHARMAPS))


def names() -> list[str]:
    """Every usable file of the running interpreter's library, sorted."""
    found = (path.relative_to(LIBRARY).as_posix() for path in LIBRARY.rglob("*.py"))
    return sorted(name for name in found if usable(name))


def digest(name: str) -> str:
    return hashlib.sha256((LIBRARY / name).read_bytes()).hexdigest()


def listed() -> dict[str, str]:
    """Name to sha256, as committed."""
    rows = (line.split() for line in LIST.read_text(encoding="utf-8").splitlines())
    return {name: value for value, name in rows}


def held_out() -> list[str]:
    return HELD_OUT.read_text(encoding="utf-8").split()


def texts(split: str) -> list[tuple[str, str]]:
    """(name, text) of each file of ``split``, "train" or "held-out". Stops where the library is not the listed one."""
    apart = set(held_out())
    chosen = [name for name in listed() if (name in apart) == (split == "held-out")]
    wrong = [name for name in chosen if not (LIBRARY / name).is_file() or digest(name) != listed()[name]]
    if wrong:
        sys.exit(f"{len(wrong)} files of {LIBRARY} are not those of files.txt (CPython 3.11.7), first: {wrong[0]}")
    return [(name, (LIBRARY / name).read_text(encoding="utf-8", errors="replace")) for name in chosen]


def main() -> None:
    if "--write" in sys.argv[1:]:
        LIST.write_text("".join(f"{digest(name)}  {name}\n" for name in names()), encoding="utf-8")
    for split in ("train", "held-out"):
        chosen = texts(split)
        print(f"{split}: {len(chosen)} files, {sum(len(text) for _, text in chosen)} characters")


if __name__ == "__main__":
    main()
