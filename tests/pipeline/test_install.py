"""`make install`: environments that are whole or not, wherever the clone lies, and pip's settings in uv's hands."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from pipeline_parts import ROOT


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A folder with the Makefile and an environment, whose path is hard on shells."""
    folder = tmp_path / "my clone's"
    (folder / "workflow").mkdir(parents=True)
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / ".venv"], check=True)
    for marker in (".installed", ".made-by-make-install"):
        (folder / ".venv" / marker).touch()
    return folder


def make(folder: Path, *arguments: str, code: int = 0) -> str:
    """What `make` prints in the folder, where it ends with this exit code."""
    # Without what a `make test` around this test leaves: its options, and its depth, at which make says which folder it enters.
    env = {key: value for key, value in os.environ.items() if key not in {"VIRTUAL_ENV", "MAKEFLAGS", "MFLAGS", "MAKELEVEL"}}
    done = subprocess.run(["make", *arguments], cwd=folder, env=env, text=True, capture_output=True, timeout=60)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def made_anew(folder: Path, venv: str = ".venv") -> bool:
    """Whether `make install` would move this environment away and make another."""
    return 'test -z "yes"' in make(folder, "-n", "install", f"VENV={venv}")


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_a_user_without_a_name_or_a_home_gets_both(clone: Path) -> None:
    """As `docker run -u 12345` has it: no line in /etc/passwd, and / for a home."""
    program = "import getpass, pathlib; print(getpass.getuser(), pathlib.Path.home())"
    (clone / "who.mk").write_text(f"include Makefile\nwho:\n\t@/usr/bin/env python3 -c '{program}'\n", encoding="utf-8")
    for folder in (clone, *clone.parents[:2]):
        folder.chmod(0o755)
    nobody = {"user": 12345, "group": 12345}
    home = f"{clone}/data/state/home"
    for env, process, expected in (
        ({}, nobody, f"user-12345 {home}"),
        ({"HOME": "/"}, nobody, f"user-12345 {home}"),
        ({"HOME": str(clone.parent), "LOGNAME": "mia"}, {}, f"mia {clone.parent}"),
    ):
        command = ["make", "-f", "who.mk", "who", "BIN=/usr/bin"]
        env |= {"PATH": "/usr/bin:/bin"}
        shown = subprocess.run(command, cwd=clone, env=env, text=True, capture_output=True, **process)
        assert shown.stdout.strip() == expected, shown.stderr


def test_recipes_heed_no_shell_hook_or_notebook_around(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And they find the environment whatever the clone's path."""
    variables = ["SHELL", "GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "PIP_TARGET", "PYTHONSAFEPATH", "MPLBACKEND"]
    for name in variables:
        monkeypatch.setenv(name, "/bin/false")
    (clone / "workflow/repro.py").write_text(f"import os, sys; print(sys.prefix, *map(os.environ.get, {variables}))")
    assert make(clone, "repro").strip() == f"{clone}/.venv /bin/sh{6 * ' None'}"


def test_every_recipe_is_a_shell_script_whatever_the_clones_path(clone: Path) -> None:
    (clone / ".venv/.installed").unlink()
    targets = [line.split()[1] for line in make(clone, "help").splitlines()]
    assert {"install", "test-vllm", "pins"} <= set(targets)
    for target in targets:
        parsed = subprocess.run(["sh", "-n"], input=make(clone, "-n", target), text=True, capture_output=True)
        assert parsed.returncode == 0, (target, parsed.stderr)


def test_what_works_and_what_is_none_is_kept_and_what_was_moved_or_copied_is_made_anew(clone: Path) -> None:
    (clone / "linked").symlink_to(clone / ".venv")
    (clone / "precious").mkdir()
    (clone / "precious/file").touch()
    assert not any(made_anew(clone, venv) for venv in (".venv", "linked", "none", "precious"))
    shutil.copytree(clone, clone.with_name("copied"), symlinks=True)
    assert made_anew(clone.with_name("copied")) and not made_anew(clone)
    clone.rename(clone.with_name("moved"))
    assert made_anew(clone.with_name("moved"))


def lose_python(clone: Path) -> None:
    for python in (clone / ".venv/bin").glob("python*"):
        python.unlink()
    (clone / ".venv/bin/python").symlink_to("/no/such/python")


DAMAGES: dict[str, Callable[[Path], object]] = {
    "stopped while packages were installed": lambda clone: (clone / ".venv/.installing").touch(),
    "stopped while it was made": lambda clone: (clone / ".venv/bin/activate").unlink(),
    "stopped while it was removed": lambda clone: (clone / ".venv/pyvenv.cfg").unlink(),
    "its Python is gone": lose_python,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_an_environment_that_cannot_work_is_made_anew(clone: Path, damage: Callable[[Path], object]) -> None:
    damage(clone)
    assert made_anew(clone)


@pytest.mark.parametrize("kind", ["environment", "notes"])
def test_a_folder_of_the_users_own_is_never_removed(clone: Path, tmp_path: Path, kind: str) -> None:
    """VENV may stand in the environment for another purpose. A damaged one of ours is removed, and only that."""
    folder = tmp_path / "mine"
    if kind == "environment":
        shutil.copytree(clone / ".venv", folder, symlinks=True)  # so that it was moved
        (folder / ".made-by-make-install").unlink()
    folder.mkdir(exist_ok=True)
    (folder / "notes.txt").write_text("precious")
    shown = make(clone, "install", f"VENV={folder}", f"PYTHON={sys.executable}", code=2)
    assert shown.startswith(f"{folder}: ") and "ame another folder: make VENV=FOLDER" in shown
    assert (folder / "notes.txt").read_text() == "precious" and not (folder / ".installing").exists()


def test_an_environment_without_pip_gets_it(clone: Path) -> None:
    """As `uv venv` makes it. PIP_NO_INDEX stops the installation after that step."""
    (clone / ".venv/.installed").unlink()
    assert "installing into" in make(clone, "install", "PIP_NO_INDEX=1", "PIP_CONFIG_FILE=/dev/null", "PIP_FIND_LINKS=", code=2)
    subprocess.run([clone / ".venv/bin/python", "-m", "pip", "--version"], check=True, capture_output=True)


@pytest.mark.parametrize(
    ("target", "extras", "cuda", "told"),
    [
        (
            "install",
            "ray,pipeline",
            None,
            "CPUs. Jobs on NVIDIA GPUs need another build: rm -r .venv && UV_TORCH_BACKEND=cu130",
        ),
        ("dev", "dev", "13.0", "CUDA 13.0. A smaller build is for CPUs only: rm -r .venv && UV_TORCH_BACKEND=cpu"),
    ],
    ids=["install", "dev"],
)
def test_an_installation_obeys_the_pins_and_says_which_torch_it_took(
    clone: Path, target: str, extras: str, cuda: str | None, told: str
) -> None:
    """Another program stands for uv: it installs nothing, and writes down what it is asked for. torch is an empty one."""
    site = next((clone / ".venv/lib").glob("python*/site-packages"))
    for name in ("pip", "uv", "packaging", "pydantic", "typing_", "filelock"):  # pip is slow where it finds all the others
        for path in Path(sysconfig.get_path("purelib")).glob(f"{name}*"):
            (site / path.name).symlink_to(path)
    (site / "project.pth").write_text(f"{ROOT}\n")
    for name, file, text in (("torch", "__init__", ""), ("torch", "version", f"cuda = {cuda!r}\n")):
        (site / name).mkdir(exist_ok=True)
        (site / name / f"{file}.py").write_text(text)
    (site / "torch-9.8.dist-info").mkdir()
    (site / "torch-9.8.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 9.8\n")
    shutil.copy(ROOT / "workflow/uv_pip.py", clone / "workflow")
    (clone / ".venv/bin/uv").write_text('#!/bin/sh\nprintf "%s\\n" "$@" > asked\n')
    (clone / ".venv/bin/uv").chmod(0o755)
    (clone / ".venv/.installed").unlink()
    assert make(clone, target).splitlines()[-1] == f"torch 9.8 is for {told} make install"
    asked = (clone / "asked").read_text().splitlines()
    assert asked[:2] == ["pip", "install"] and asked[-4:] == ["--constraint", "constraints.txt", "--editable", f".[{extras}]"]


def test_an_image_has_all_that_an_installation_reads() -> None:
    """The image is installed before the code is copied, so a file that is missing there ends the build."""
    before, _, _ = (ROOT / "Dockerfile").read_text().partition("RUN make install")
    copied = {name for line in before.splitlines() if line.startswith("COPY ") for name in line.split()[1:-1]}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packed = {*project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"], project["project"]["readme"]}
    assert packed | {"Makefile", "constraints.txt", "pyproject.toml", "workflow", "grpo/__init__.py"} <= copied


def wheel(folder: Path, name: str, version: str = "1") -> None:
    """Write a package of one module, which says its version."""
    folder.mkdir(parents=True, exist_ok=True)
    about = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as file:
        file.writestr(f"{name}.py", f"VERSION = {version}\n")
        file.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        file.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{about}/RECORD", "")


@pytest.mark.slow
@pytest.mark.parametrize("from_file", [False, True], ids=["environment", "file"])
def test_uv_takes_packages_from_where_pip_does(tmp_path: Path, from_file: bool) -> None:
    """Two folders of packages, and two indexes, of which the second has the newer one."""
    wheel(tmp_path / "one", "aaa")
    wheel(tmp_path / "two", "bbb")
    wheel(tmp_path / "first/ccc", "ccc", "1")
    wheel(tmp_path / "second/ccc", "ccc", "2")
    for index, version in (("first", 1), ("second", 2)):
        file = f"ccc-{version}-py3-none-any.whl"
        (tmp_path / index / "ccc/index.html").write_text(f'<a href="{file}">{file}</a>')
    links = [str(tmp_path / each) for each in ("one", "two")]
    indexes = [(tmp_path / each).as_uri() for each in ("first", "second")]
    env = {key: value for key, value in os.environ.items() if not key.startswith(("PIP_", "UV_"))} | {
        "UV_CACHE_DIR": f"{tmp_path}/cache"
    }
    if from_file:
        places = f"find-links =\n  {links[0]}\n  {links[1]}\n[install]\nextra-index-url = {indexes[1]}\n"
        (tmp_path / "pip.conf").write_text(f"[global]\nindex-url = {indexes[0]}\n{places}")
        env |= {"PIP_CONFIG_FILE": str(tmp_path / "pip.conf")}
    else:
        env |= {"PIP_FIND_LINKS": " ".join(links), "PIP_INDEX_URL": indexes[0], "PIP_EXTRA_INDEX_URL": indexes[1]}
    packages = ["--no-deps", "--target", str(tmp_path / "by uv"), "aaa", "bbb", "ccc"]
    command = [sys.executable, ROOT / "workflow/uv_pip.py", "install", "--python", sys.executable]
    by_uv = subprocess.run([*command, *packages], env=env, text=True, capture_output=True)
    assert by_uv.returncode == 0, by_uv.stderr
    packages[2] = str(tmp_path / "by pip")
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *packages], env=env, check=True, capture_output=True)
    for name, version in (("aaa", 1), ("bbb", 1), ("ccc", 2)):
        assert [(tmp_path / by / f"{name}.py").read_text() for by in ("by uv", "by pip")] == [f"VERSION = {version}\n"] * 2
    if not from_file:  # and neither from an index where pip must not ask one
        env |= {"PIP_NO_INDEX": "1"}
        refused = subprocess.run([*command, *packages[:2], str(tmp_path / "none"), "ccc"], env=env, capture_output=True)
        assert refused.returncode != 0
