"""The rules of the house, read from the syntax tree. Each check takes one source and yields "path:line: what is wrong".

The tables at the top are the rules; ``test_house.py`` runs them on the tree and shows that each can fail.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("mlx_spec", "convert", "apps", "tests", "benchmarks", "recipes")

# Which room may import which. Every room may raise (errors) and speak through the seams (contracts).
LEAVES = {"contracts", "accept", "sampling", "noise", "processors", "costs", "hub", "text", "options", "stats"}
LEAVES |= {"errors", "blas", "folders", "distributed"}
BELOW_API = LEAVES | {"engine", "loop", "sessions", "policy", "measure", "targets", "drafters", "caches", "kernels"}
EVERYONE = {"contracts", "errors"}
ARROWS: dict[str, set[str]] = {
    "__init__": {"api", "options", "sampling", "errors"},  # the public names, resolved on first use
    "api": BELOW_API,
    "engine": BELOW_API - {"engine"},
    "loop": {"accept", "sampling", "stats"},
    "sessions": {"caches"},
    "policy": {"costs", "stats"},
    "measure": {"costs", "stats"},
    "targets": {"caches", "kernels", "hub", "folders"},
    "drafters": {"caches", "costs", "kernels", "hub", "folders", "targets", "options"},
    "caches": LEAVES,
    "kernels": LEAVES,
    "convert": BELOW_API | {"api"},
    "apps": BELOW_API | {"api", "__init__", "convert"},
    # A leaf stands alone but for these.
    "contracts": set(),
    "errors": set(),
    "sampling": {"noise", "processors"},
    "hub": {"folders"},
}
PURE = ("errors", "options", "stats", "blas")  # leaves that a front end imports before it has chosen a BLAS
MLX = {"mlx", "mlx_lm"}
FRONT_END = {"click", "rich", "prompt_toolkit", "tomlkit", "starlette", "uvicorn", "webview"}

FILE_LINES, FUNCTION_LINES = 400, 80
FILE_MEDIAN, FUNCTION_USUAL, FUNCTION_SHARE = 150, 45, 0.95
CAPS = {"mlx_spec/loop.py": 150}

# The outermost boundary of each app: where any failure becomes an exit code.
BOUNDARIES = {("apps/cli/__init__.py", "run")}
BROAD = {"Exception", "BaseException"}

RETYPES = "mlx_spec/targets/taps.py"  # gives one layer object a subclass of its own class, and takes it back

# Words with another meaning in this house, and what to say instead.
WORDS = {
    "block_size": "width, or trained block",
    "cycle": "round",
    "cycles": "rounds",
    "tau": "acceptance length",
    "mean_accepted": "acceptance length",
    "acceptance_rate": "accepted and drafted",
    "bonus": "the target's own token",
    "speculator": "drafter",
}
ALLOWED_WORDS = {  # (file or folder, identifier): why
    ("mlx_spec/drafters/_dflash_config.py", "block_size"): "the checkpoint's own key",
    ("mlx_spec/drafters/dflash.py", "block_size"): "the checkpoint's own key",
    ("convert/train/learner.py", "block_size"): "the checkpoint's own key",
}


@dataclass(frozen=True)
class Source:
    path: str  # as in the repository, with forward slashes
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def room(self) -> str:
        """The room of design terms: a module or folder of the engine, or "apps", "convert", "tests", ..."""
        parts = Path(self.path).with_suffix("").parts
        if parts[0] != "mlx_spec":
            return parts[0]
        return "blas" if parts[1] == "_blas_check" else parts[1]

    @property
    def engine(self) -> bool:
        return self.path.startswith("mlx_spec/")

    def at(self, node: ast.AST, what: str) -> str:
        return f"{self.path}:{getattr(node, 'lineno', 1)}: {what}"


def sources() -> list[Source]:
    found = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    return [Source(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")) for path in found]


# --- imports ----------------------------------------------------------------------------------------------------------


def imported(source: Source) -> Iterator[tuple[ast.AST, str]]:
    """(node, full module name) of every import, relative and ``import_module`` ones included."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(source, node)
            yield from ((node, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and _last_name(node.func) in ("import_module", "__import__") and node.args:
            name = _leading_text(node.args[0])
            if name:
                yield node, name


def _absolute(source: Source, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    package = list(Path(source.path).parent.parts)
    if package[0] in ("apps", "convert"):
        package = ["mlx_spec", *package]
    package = package[: len(package) - node.level + 1]
    return ".".join([*package, *([node.module] if node.module else [])])


def _leading_text(node: ast.expr) -> str:
    if isinstance(node, ast.JoinedStr) and node.values:
        node = node.values[0]
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _last_name(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def room_named(module: str) -> str | None:
    """The room of a full module name; None outside the product."""
    parts = module.rstrip(".").split(".")
    if parts[0] != "mlx_spec":
        return None
    if len(parts) > 1 and parts[1] == "_blas_check":
        return "blas"
    return parts[1] if len(parts) > 1 and parts[1] in ARROWS.keys() | LEAVES else "__init__"


def arrows(source: Source) -> Iterator[str]:
    """Imports go down, only along the table's rows; pure leaves import no mlx, the engine no front end's libraries."""
    if source.room not in ARROWS.keys() | LEAVES:
        if source.engine:
            yield f"{source.path}:1: room {source.room!r} is not in the table of arrows"
        return
    allowed = ARROWS.get(source.room, set()) | EVERYONE | {source.room}
    for node, module in imported(source):
        room, package = room_named(module), module.split(".")[0]
        if room is not None and room not in allowed:
            yield source.at(node, f"{source.room} may not import {room} ({module})")
        if package in MLX and source.room in PURE:
            yield source.at(node, f"{source.room} may not import {package}: front ends import it before mlx")
        if package in FRONT_END and source.room not in ("apps", "tests"):
            yield source.at(node, f"{source.room} may not import {package}, a front end's library")


# --- sizes and docstrings ---------------------------------------------------------------------------------------------


def functions(source: Source) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    yield from (node for node in ast.walk(source.tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def length(node: Any) -> int:
    return int(node.end_lineno - node.lineno + 1)


def lines(source: Source) -> int:
    return len(source.text.splitlines())


def sizes(source: Source) -> Iterator[str]:
    cap = CAPS.get(source.path, FILE_LINES)
    if lines(source) > cap:
        yield f"{source.path}:1: {lines(source)} lines, the cap is {cap}"
    for node in functions(source):
        if length(node) > FUNCTION_LINES:
            yield source.at(node, f"{node.name} has {length(node)} lines, the cap is {FUNCTION_LINES}")


def docstrings(source: Source) -> Iterator[str]:
    """Every module that holds code says what it does; so do the engine's public functions and classes."""
    if source.text.strip() and not ast.get_docstring(source.tree):
        yield f"{source.path}:1: no module docstring"
    if not source.engine or (Path(source.path).name.startswith("_") and not source.path.endswith("__init__.py")):
        return
    for node in source.tree.body:
        public = isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
        if public and not ast.get_docstring(node):
            yield source.at(node, f"{node.name} is public and has no docstring")


# --- conduct ----------------------------------------------------------------------------------------------------------


def excepts(source: Source) -> Iterator[str]:
    """No bare or broad ``except`` (or ``suppress``) but at an app's outermost boundary."""
    at_boundary = {
        id(inner)
        for node in functions(source)
        if (source.path, node.name) in BOUNDARIES
        for inner in ast.walk(node)
    }
    for node in ast.walk(source.tree):
        if id(node) in at_boundary:
            continue
        if isinstance(node, ast.ExceptHandler):
            kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            wide = [kind for kind in kinds if kind is None or _last_name(kind) in BROAD]
        elif isinstance(node, ast.Call) and _last_name(node.func) == "suppress":
            wide = [kind for kind in node.args if _last_name(kind) in BROAD]
        else:
            continue
        if wide:
            yield source.at(node, "a bare or broad except outside an app's outermost boundary")


def environment(source: Source) -> Iterator[str]:
    """The environment is read in apps only. Setting a variable for a library is a write, and allowed."""
    if source.room in ("apps", "tests", "benchmarks"):
        return
    writes = set()
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            writes.add(id(node.value))
        called = node.value.func if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) else None
        if isinstance(called, ast.Attribute) and called.attr == "setdefault":
            writes.add(id(called.value))
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            names = {alias.name for alias in node.names}
        else:
            names = {_last_name(node)} if isinstance(node, ast.Attribute) and _last_name(node.value) == "os" else set()
        if names & {"environ", "environb", "getenv", "getenvb"} and id(node) not in writes:
            yield source.at(node, "reads the environment outside apps")


def patches(source: Source) -> Iterator[str]:
    """No class or module of mlx-lm is changed; an object's class is changed in one file only."""
    if source.room == "tests":
        return
    foreign = set(_names_from_mlx_lm(source))
    for node in ast.walk(source.tree):
        for target in _stored_attributes(node):
            chain = _chain(target)
            if chain[0] in foreign:
                yield source.at(node, f"assigns to {'.'.join(chain)}, which belongs to mlx-lm")
            elif chain[-1] == "__class__" and source.path != RETYPES:
                yield source.at(node, f"changes the class of an object outside {RETYPES}")
            elif "__class__" in chain[:-1] or chain[0] == "type()":
                yield source.at(node, f"assigns to an attribute of a class ({'.'.join(chain)})")


def _names_from_mlx_lm(source: Source) -> Iterator[str]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "mlx_lm":
                    yield alias.asname or "mlx_lm"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "mlx_lm":
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and node.value.args:
            found = _last_name(node.value.func) == "import_module" and _leading_text(node.value.args[0])
            if found and found.split(".")[0] == "mlx_lm":
                yield from (target.id for target in node.targets if isinstance(target, ast.Name))


def _stored_attributes(node: ast.AST) -> Iterator[ast.expr]:
    """Attributes that a statement writes or deletes, ``setattr`` and ``x.__dict__[...]`` included."""
    written = not isinstance(getattr(node, "ctx", None), ast.Load)
    if isinstance(node, ast.Attribute) and written:
        yield node
    elif isinstance(node, ast.Subscript) and written and _last_name(node.value) == "__dict__":
        yield node.value
    elif isinstance(node, ast.Call) and _last_name(node.func) in ("setattr", "delattr", "__setattr__") and node.args:
        name = _leading_text(node.args[1]) if len(node.args) > 1 else ""
        yield ast.Attribute(value=node.args[0], attr=name or "?", ctx=ast.Store())


def _chain(node: ast.expr) -> list[str]:
    """``a.b().c`` as ["a", "b", "c"]; ``type(x).c`` as ["type()", "c"]."""
    if isinstance(node, ast.Attribute):
        return [*_chain(node.value), node.attr]
    if isinstance(node, ast.Call):
        return ["type()"] if _last_name(node.func) == "type" else _chain(node.func)
    if isinstance(node, ast.Subscript):
        return _chain(node.value)
    return [node.id if isinstance(node, ast.Name) else "?"]


def vocabulary(source: Source) -> Iterator[str]:
    """Identifiers use the house's words; a file format's own keys are named in the table of exceptions."""
    if source.room in ("tests", "benchmarks"):
        return
    for node in ast.walk(source.tree):
        for name in _identifiers(node):
            plain = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
            for word, instead in WORDS.items():
                if f"_{word}_" in f"_{plain}_" and (source.path, name) not in ALLOWED_WORDS:
                    yield source.at(node, f"{name}: say {instead}")


def _identifiers(node: ast.AST) -> list[str]:
    fields = {ast.Name: "id", ast.Attribute: "attr", ast.arg: "arg", ast.keyword: "arg", ast.alias: "asname"}
    fields |= dict.fromkeys((ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef), "name")
    value = getattr(node, fields.get(type(node), ""), None) if type(node) in fields else None
    return [value] if value else []


CHECKS: tuple[Callable[[Source], Iterator[str]], ...] = (
    arrows, sizes, docstrings, excepts, environment, patches, vocabulary,
)  # fmt: skip
