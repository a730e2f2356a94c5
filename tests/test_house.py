"""The tree keeps the rules of ``house.py``, and every rule can be broken by a planted violation."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from statistics import median

import house
import pytest
from house import CHECKS, Source

SOURCES = house.sources()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_tree(check) -> None:
    wrong = [line for source in SOURCES for line in check(source)]
    assert not wrong, "\n".join(wrong)


def test_tree_is_whole() -> None:
    """The checks look at the product, not at an empty list."""
    paths = {source.path for source in SOURCES}
    assert {"mlx_spec/loop.py", "mlx_spec/api.py", "apps/cli/__init__.py", "tests/house.py"} <= paths


def test_median_file() -> None:
    for folders in (("mlx_spec", "convert", "apps"), house.FOLDERS):
        sizes = [house.lines(source) for source in SOURCES if source.path.startswith(folders) and source.text.strip()]
        assert median(sizes) <= house.FILE_MEDIAN, sorted(sizes)


def test_usual_function() -> None:
    """95 of 100 functions are short."""
    sizes = [(house.length(node), source.at(node, node.name)) for source in SOURCES for node in house.functions(source)]
    long = sorted(item for item in sizes if item[0] > house.FUNCTION_USUAL)
    assert len(long) <= (1 - house.FUNCTION_SHARE) * len(sizes), long


def function_of(lines: int) -> str:
    return '"""d."""\n\n\ndef f():\n' + "    x = 1\n" * (lines - 1)


PLANTED = [
    # check, path, text, what the message says ("" : nothing is wrong)
    ("arrows", "mlx_spec/loop.py", "from mlx_spec.targets import wrap", "may not import targets"),
    ("arrows", "mlx_spec/loop.py", "from mlx_spec import stats, engine", "may not import engine"),
    ("arrows", "mlx_spec/loop.py", "from mlx_spec import Engine", "may not import __init__"),
    ("arrows", "mlx_spec/loop.py", "from mlx_spec import accept, stats", ""),
    ("arrows", "mlx_spec/caches/ring.py", "from ..sessions import Session", "may not import sessions"),
    ("arrows", "mlx_spec/caches/ring.py", "from . import append\nfrom ..errors import PairError", ""),
    ("arrows", "mlx_spec/drafters/new.py", "import mlx_spec.apps.config", "may not import apps"),
    ("arrows", "mlx_spec/drafters/new.py", "m = import_module(f'mlx_spec.loop.{n}')", "may not import loop"),
    ("arrows", "mlx_spec/drafters/new.py", "import mlx_spec.convert.gguf", "may not import convert"),
    ("arrows", "mlx_spec/text.py", "def f():\n    from mlx_spec.stats import Stats", "text may not import stats"),
    ("arrows", "mlx_spec/sampling.py", "from mlx_spec.noise import keyed", ""),
    ("arrows", "mlx_spec/noise.py", "from mlx_spec.sampling import Sampler", "may not import sampling"),
    ("arrows", "mlx_spec/attic.py", "x = 1", "not in the table"),
    ("arrows", "mlx_spec/blas.py", "import mlx.core as mx", "import it before mlx"),
    ("arrows", "mlx_spec/_blas_check.py", "from mlx_lm import load", "import it before mlx"),
    ("arrows", "mlx_spec/text.py", "import click", "front end's library"),
    ("arrows", "convert/gguf.py", "from mlx_spec.apps.models import names", "may not import apps"),
    ("arrows", "convert/gguf.py", "from ..apps import models", "may not import apps"),
    ("arrows", "apps/models.py", "from mlx_spec.convert import gguf\nfrom mlx_spec.api import load", ""),
    ("sizes", "mlx_spec/text.py", "x = 1\n" * 401, "401 lines"),
    ("sizes", "mlx_spec/text.py", "x = 1\n" * 400, ""),
    ("sizes", "mlx_spec/loop.py", "x = 1\n" * 151, "151 lines"),
    ("sizes", "apps/cli/chat.py", function_of(81), "f has 81 lines"),
    ("sizes", "apps/cli/chat.py", function_of(80), ""),
    ("docstrings", "apps/store.py", "x = 1", "no module docstring"),
    ("docstrings", "mlx_spec/text.py", '"""d."""\ndef split(): ...', "split is public"),
    ("docstrings", "mlx_spec/text.py", '"""d."""\nclass Text: ...', "Text is public"),
    ("docstrings", "mlx_spec/text.py", '"""d."""\ndef _split(): ...', ""),
    ("excepts", "mlx_spec/loop.py", "try: f()\nexcept: g()", "bare or broad"),
    ("excepts", "mlx_spec/loop.py", "try: f()\nexcept Exception as e: raise", "bare or broad"),
    ("excepts", "mlx_spec/loop.py", "try: f()\nexcept (ValueError, builtins.BaseException): g()", "bare or broad"),
    ("excepts", "mlx_spec/loop.py", "with contextlib.suppress(Exception): f()", "bare or broad"),
    ("excepts", "mlx_spec/loop.py", "try: f()\nexcept (ValueError, KeyError): g()", ""),
    ("excepts", "apps/cli/__init__.py", "def run():\n    try: f()\n    except Exception: g()", ""),
    ("excepts", "apps/cli/chat.py", "def run():\n    try: f()\n    except Exception: g()", "bare or broad"),
    ("environment", "mlx_spec/hub.py", "import os\nx = os.environ['HF_HOME']", "reads the environment"),
    ("environment", "mlx_spec/hub.py", "import os\nx = os.getenv('HF_HOME')", "reads the environment"),
    ("environment", "mlx_spec/hub.py", "from os import environ", "reads the environment"),
    ("environment", "convert/gguf.py", "x = os.environ.get('X')", "reads the environment"),
    ("environment", "mlx_spec/hub.py", "x = os.environ.setdefault('A', 'b')", "reads the environment"),
    ("environment", "mlx_spec/hub.py", "f(env=os.environ)", "reads the environment"),
    ("environment", "mlx_spec/blas.py", "os.environ.setdefault('A', 'b')\nos.environ['C'] = 'd'", ""),
    ("environment", "apps/config.py", "x = os.environ.get('X')", ""),
    ("patches", "mlx_spec/engine.py", "import mlx_lm\nmlx_lm.generate.stream = f", "belongs to mlx-lm"),
    ("patches", "mlx_spec/engine.py", "from mlx_lm.models import qwen3 as q\nq.Model.x = f", "belongs to mlx-lm"),
    ("patches", "mlx_spec/engine.py", "from mlx_lm.models.cache import KVCache\nKVCache.trim = f", "belongs to mlx-lm"),
    ("patches", "mlx_spec/engine.py", "from mlx_lm.models import KVCache\nsetattr(KVCache, 'trim', f)", "KVCache.trim"),
    ("patches", "mlx_spec/engine.py", "import mlx_lm.utils\ndel mlx_lm.utils.load", "belongs to mlx-lm"),
    ("patches", "mlx_spec/engine.py", "m = importlib.import_module('mlx_lm.models.x')\nm.x = 1", "belongs to mlx-lm"),
    ("patches", "mlx_spec/engine.py", "import mlx_lm\nmlx_lm.__dict__['load'] = f", "belongs to mlx-lm"),
    ("patches", "mlx_spec/engine.py", "model.__class__ = Other", "changes the class"),
    ("patches", "mlx_spec/engine.py", "setattr(model, '__class__', Other)", "changes the class"),
    ("patches", "mlx_spec/targets/taps.py", "layer.__class__ = Other", ""),
    ("patches", "mlx_spec/targets/taps.py", "layer.__class__.__call__ = f", "attribute of a class"),
    ("patches", "mlx_spec/engine.py", "type(model).__call__ = f", "attribute of a class"),
    ("patches", "mlx_spec/engine.py", "from mlx_lm import load\nmodel = load('x')\nmodel.extra = 1\nself.x = load", ""),
    ("vocabulary", "mlx_spec/policy.py", "cycle = 1", "say round"),
    ("vocabulary", "apps/cli/figures.py", "def show(mean_accepted): ...", "say acceptance length"),
    ("vocabulary", "mlx_spec/stats.py", "class CycleCount: ...", "say round"),
    ("vocabulary", "mlx_spec/loop.py", "f(block_size=3)", "say width"),
    ("vocabulary", "mlx_spec/drafters/_dflash_config.py", "block_size: int = 3", ""),
    ("vocabulary", "mlx_spec/loop.py", "recycled = motorcycle", ""),
]  # fmt: skip


@pytest.mark.parametrize(("check", "path", "text", "message"), PLANTED)
def test_planted(check: str, path: str, text: str, message: str) -> None:
    found = list(getattr(house, check)(Source(path, text)))
    assert bool(found) == bool(message), found
    assert all(message in line and line.startswith(f"{path}:") for line in found)


def test_every_check_is_planted() -> None:
    broken = {check for check, _, _, message in PLANTED if message}
    assert broken == {check.__name__ for check in CHECKS}


# Run in a fresh process: every function of mlx.core notes how many of our own calls lie above its first use.
HOPS = """
import json, sys, types
import mlx.core as mx
from pathlib import Path

root = sys.argv[1]
ours = tuple(str(Path(root, folder)) for folder in ("mlx_spec", "apps", "convert"))
QUERIES = ("default_device", "device_info", "is_available", "get_", "set_", "clear_", "reset_", "synchronize")
first = []


def noted(name, function):
    def call(*args, **kwargs):
        names, frame = [], sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            if code.co_name == "<module>" and not str(code.co_filename).startswith("<string"):
                return function(*args, **kwargs)  # at import
            if str(code.co_filename).startswith(ours):
                names.append(code.co_name)
            frame = frame.f_back
        if not first:
            first.extend([name, names[::-1]])
        return function(*args, **kwargs)
    return call


for home in (mx, mx.random, mx.fast):
    for name in dir(home):
        value = getattr(home, name)
        if callable(value) and not isinstance(value, type) and not name.startswith(("_", *QUERIES)):
            setattr(home, name, noted(name, value))

from mlx_spec.apps.cli import main

sys.argv[1:] = sys.argv[2:]
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
print(json.dumps(first))
"""


def test_hops_from_the_command_line(tiny_folder: Path, cli_env: dict[str, str]) -> None:
    """At most six calls of ours lie between the command line and the first thing mlx does."""
    words = ["generate", "--model", str(tiny_folder), "--prompt", "hi", "--max-tokens", "2", "--blas", "bundled"]
    done = subprocess.run(
        [sys.executable, "-c", HOPS, str(house.ROOT), *words],
        env=cli_env, capture_output=True, text=True, check=False, timeout=120, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    name, calls = json.loads(done.stdout.splitlines()[-1])
    assert calls[0] == "main"
    assert len(calls) <= 6, f"mx.{name} is reached through {' > '.join(calls)}"
