"""The wheel, built from a copy of the source tree and installed into an environment that has never seen it."""

import shutil
import subprocess
import sys
import venv
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("schemas", "cext", "sidecar", "connector")
IMPORTS = "; ".join(
    [
        "import sys, hostkv.schemas.messages, hostkv.cext, hostkv.sidecar, hostkv.connector",
        "assert len(hostkv.cext.derive_keys(bytes(32), [b'id'])) == 32",
        "assert all(sys.prefix in package.__file__ for package in (hostkv.schemas, hostkv.cext, hostkv.sidecar, hostkv.connector))",
        "print('imported')",
    ]
)


def run(*command: object, cwd: Path) -> str:
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=1200
    )
    assert done.returncode == 0, f"{command}:\n{done.stdout}"
    return done.stdout


def has_build_requirements() -> bool:
    try:
        return int(version("setuptools").split(".")[0]) >= 77
    except PackageNotFoundError:
        return False


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """site-packages of a fresh environment with the wheel in it. A copy is built, so that nothing appears in the source tree."""
    work = tmp_path_factory.mktemp("wheel")
    source = work / "source"
    ignored = shutil.ignore_patterns("*.so", "*.egg-info", "__pycache__")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=ignored)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    isolation = ["--no-build-isolation"] if has_build_requirements() else []  # else pip fetches them
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", *isolation, "-w", work / "dist", source, cwd=work)
    (wheel,) = (work / "dist").glob("hostkv-*.whl")
    venv.create(work / "venv", with_pip=True)
    python = work / "venv" / "bin" / "python"
    run(python, "-m", "pip", "install", "-q", wheel, cwd=work)
    return Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('platlib'))", cwd=work).strip())


def test_the_wheel_puts_nothing_but_hostkv_into_site_packages(site: Path) -> None:
    (info,) = site.glob("hostkv-*.dist-info")
    recorded = {line.split(",")[0] for line in (info / "RECORD").read_text().splitlines()}
    assert {path.split("/")[0] for path in recorded} == {"hostkv", info.name, ".."}
    assert [path for path in recorded if path.startswith("..")] == ["../../../bin/hostkv"]
    assert {path.split("/")[1] for path in recorded if path.startswith("hostkv/")} == set(PACKAGES)


def test_the_wheel_carries_the_public_header_the_types_and_the_protocol(site: Path) -> None:
    for name in ("cext/hostkv.h", "cext/_cext.pyi", "cext/py.typed", "schemas/PROTOCOL.md", "schemas/layout.h", "schemas/py.typed"):
        assert (site / "hostkv" / name).is_file(), name
    assert not [path.name for path in (site / "hostkv").rglob("*.c")]
    assert (site / "hostkv" / "cext" / "hostkv.h").read_text() == (ROOT / "cext" / "hostkv.h").read_text()


def test_an_installed_wheel_imports_from_anywhere(site: Path, tmp_path: Path) -> None:
    python = site.parents[2] / "bin" / "python"
    assert run(python, "-I", "-W", "error", "-c", IMPORTS, cwd=tmp_path).endswith("imported\n")
