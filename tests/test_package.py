"""What is installed: version, licence, every package, and an import that does not start jax."""

import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import metadata, version
from pathlib import Path

import pytest

import jaxpipe

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

pytestmark = pytest.mark.smoke


def test_installed_version_is_the_projects():
    assert jaxpipe.__version__ == PROJECT["project"]["version"]
    assert version("jaxpipe") == PROJECT["project"]["version"]


def test_changelog_has_the_version():
    assert f"## [{version('jaxpipe')}]" in (ROOT / "CHANGELOG.md").read_text()


def test_licence_is_apache_2():
    assert metadata("jaxpipe")["License-Expression"] == "Apache-2.0"
    text = (ROOT / "LICENSE").read_text()
    assert "Version 2.0, January 2004" in text and "END OF TERMS AND CONDITIONS" in text


def test_every_package_is_listed_for_installation():
    inits = (ROOT / "jaxpipe").rglob("__init__.py")
    found = {".".join(path.parent.relative_to(ROOT).parts) for path in inits}
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == found | {"jaxpipe.schedules"}


@pytest.mark.parametrize(
    "statement",
    [
        "import jaxpipe",
        "import jaxpipe.schedules",
        "import jaxpipe; jaxpipe.schedules.get('zb_v')(devices=4, microbatches=8)",
        "from jaxpipe import F, B, schedule, Schedule, Costs, Timeline",
        "import jaxpipe.cli; jaxpipe.cli.parser()",
    ],
)
def test_schedules_need_no_jax(statement):
    check = f"import sys; {statement}; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


def test_wheel_holds_all_packages_and_the_licence(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("jaxpipe", "schedules"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "-w", str(tmp_path), str(source)], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("jaxpipe-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    modules = [path.relative_to(source) for path in source.rglob("*.py")]
    expected = {
        f"jaxpipe/{path.as_posix()}" if path.parts[0] == "schedules" else path.as_posix()
        for path in modules
        if path.parts[0] != "build"
    }
    assert expected <= set(names)
    assert "jaxpipe/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
