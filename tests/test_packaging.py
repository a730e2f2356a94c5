"""What is declared is what is there, and a wheel puts nothing but ``mlx_spec`` at the top of site-packages."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import tomllib
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
MAPPED = {"mlx_spec": "mlx_spec", "mlx_spec.convert": "convert", "mlx_spec.apps": "apps"}


def folders_with_code(root: Path = ROOT) -> set[str]:
    """Package names of every product folder that holds a .py file."""
    found = set()
    for package, folder in MAPPED.items():
        for path in (root / folder).rglob("*.py"):
            found.add(".".join([package, *path.parent.relative_to(root / folder).parts]))
    return found


def test_declared_packages_are_the_folders() -> None:
    declared = PROJECT["tool"]["setuptools"]["packages"]
    assert len(declared) == len(set(declared))
    assert set(declared) == folders_with_code()


def test_a_new_folder_would_show(tmp_path: Path) -> None:
    (tmp_path / "apps" / "server").mkdir(parents=True)
    (tmp_path / "apps" / "server" / "app.py").touch()
    assert folders_with_code(tmp_path) == {"mlx_spec.apps.server"}


def test_every_package_has_an_init() -> None:
    """Without one the folder would be a namespace package, which editable and wheel installs treat differently."""
    for package in folders_with_code():
        head = next(name for name in sorted(MAPPED, key=len, reverse=True) if package.startswith(name))
        folder = ROOT / MAPPED[head] / package.removeprefix(head).replace(".", "/").lstrip("/")
        assert (folder / "__init__.py").is_file(), package


def test_mapping() -> None:
    assert PROJECT["tool"]["setuptools"]["package-dir"] == MAPPED


def test_imports_by_their_public_names() -> None:
    """The installed package finds the two mapped folders, and an import of a leaf does not import mlx."""
    code = (
        "import sys, mlx_spec.convert, mlx_spec.apps.cli, mlx_spec.errors, mlx_spec.blas\n"
        "assert 'mlx.core' not in sys.modules, 'the command line imported mlx before a BLAS was chosen'\n"
        "print(mlx_spec.apps.__file__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert Path(done.stdout.strip()) == ROOT / "apps" / "__init__.py"


def test_metadata() -> None:
    project = PROJECT["project"]
    assert project["license"] == "Apache-2.0"
    assert "Apache License" in (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert project["requires-python"] == ">=3.11"
    installed = importlib.metadata.metadata("mlx-spec")
    assert installed["Name"] == "mlx-spec"
    assert installed["Version"] == project["version"]


def test_dependencies_cover_the_imports() -> None:
    """Every third-party module that the product imports is declared, not merely brought along by another."""
    from house import imported, sources

    extras = PROJECT["project"]["optional-dependencies"]
    declared = {line.split(";")[0] for line in (*PROJECT["project"]["dependencies"], *extras["plot"])}
    names = {line.split(">")[0].split("[")[0].strip().replace("-", "_") for line in declared}
    # mlx-lm's own requirements, in versions that suit it: we handle its tokenizers, templates and weights.
    names |= {"mlx_spec", "transformers", "tokenizers", "safetensors", "jinja2"}
    product = [source for source in sources() if source.path.startswith(("mlx_spec/", "apps/", "convert/"))]
    used = {module.split(".")[0] for source in product for _, module in imported(source)} - {""}
    assert not {name for name in used if name not in sys.stdlib_module_names} - names


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel as an installer would get it, built from a copy so that no build folder is left behind."""
    import shutil

    from packaging.version import Version

    try:
        enough = Version(importlib.metadata.version("setuptools")) >= Version("77")
    except importlib.metadata.PackageNotFoundError:
        enough = False
    if not enough:
        pytest.skip("building offline needs setuptools >= 77 in this environment (the dev extra has it)")
    home = tmp_path_factory.mktemp("wheel")
    for name in ("mlx_spec", "apps", "convert", "tests"):
        shutil.copytree(ROOT / name, home / "src" / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, home / "src" / name)
    build = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--no-index", "--quiet"]
    done = subprocess.run([*build, "-w", home / "out", home / "src"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (path,) = (home / "out").glob("*.whl")
    return zipfile.ZipFile(path)


def test_wheel_holds_one_top_level_package(wheel: zipfile.ZipFile) -> None:
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"mlx_spec"}
    (info,) = (top for top in tops if top.endswith(".dist-info"))
    assert wheel.read(f"{info}/top_level.txt").split() == [b"mlx_spec"]


def test_wheel_holds_every_module_and_the_type_marker(wheel: zipfile.ZipFile) -> None:
    wanted = {"mlx_spec/py.typed"}
    for package, folder in MAPPED.items():
        base = package.replace(".", "/")
        wanted |= {f"{base}/{path.relative_to(ROOT / folder).as_posix()}" for path in (ROOT / folder).rglob("*.py")}
    assert wanted <= set(wheel.namelist())


def test_wheel_metadata(wheel: zipfile.ZipFile) -> None:
    (info,) = {name.split("/")[0] for name in wheel.namelist() if ".dist-info/" in name}
    meta = message_from_bytes(wheel.read(f"{info}/METADATA"))
    assert meta["License-Expression"] == "Apache-2.0"
    assert meta["Requires-Python"] == ">=3.11"
    assert f"{info}/licenses/LICENSE" in wheel.namelist()
    entries = wheel.read(f"{info}/entry_points.txt").decode()
    assert entries.split("\n")[:2] == ["[console_scripts]", "mlx-spec = mlx_spec.apps.cli:main"]
