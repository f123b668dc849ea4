"""Arms from an install: each checkout is exactly the declared one, or refused by name in one line."""

from __future__ import annotations

import py_compile
import shutil
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_repository import Repository, git
from tiny_study import TinyStudy

from pytest_kvqual.errors import InstallError
from pytest_kvqual.server import checkout
from pytest_kvqual.server.command import serve_command, worker_config
from pytest_kvqual.study.load import load_study, select
from pytest_kvqual.study.model import Study


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    """A committed checkout of vllm, with an extension module that its build left there."""
    found = Repository(tmp_path / "stack" / "vllm-candidate").write()
    found.put("vllm/_C.abi3.so", "machine code")
    return found


@pytest.fixture
def study(tiny_study: TinyStudy) -> Study:
    """The tiny study."""
    return load_study(str(tiny_study.folder))


def install_of(repository: Repository, study: Study, *, extra: str = "") -> checkout.Install:
    """An install that declares the checkout as it is now."""
    lines = checkout.checkout_lines(repository.root, "vllm", "candidate")
    folder = repository.root.parent
    (folder / checkout.INSTALL_FILE).write_text("\n".join(["schema = 1", *lines, extra]) + "\n")
    return checkout.read_install(folder, study)


def test_the_declared_tree_is_found(repository: Repository, study: Study) -> None:
    """What ``kvqual checkout`` prints is accepted while nothing changed, and names commit, tree and built files."""
    install = install_of(repository, study)
    (found,) = checkout.verify(install, "candidate")
    assert found.commit == repository.head()
    assert found.built.keys() == {"vllm/_C.abi3.so"}
    assert found.modules.keys() == {"vllm/__init__.py", "vllm/_C.abi3.so"}
    assert found.files == 2
    assert "path" not in found.identity()
    assert checkout.verify(install, "native") == ()


def changed(repository: Repository) -> None:
    repository.put("vllm/__init__.py", "x = 1\n")


def staged(repository: Repository) -> None:
    changed(repository)
    git(repository.root, "add", "-A")


def untracked(repository: Repository) -> None:
    repository.put("sitecustomize.py", "")


def removed(repository: Repository) -> None:
    (repository.root / "vllm/__init__.py").unlink()


def committed(repository: Repository) -> None:
    changed(repository)
    repository.commit()


def rebuilt(repository: Repository) -> None:
    repository.put("vllm/_C.abi3.so", "other machine code")


def generated(repository: Repository) -> None:
    repository.put("vllm/_version.py", "")


def unbuilt(repository: Repository) -> None:
    (repository.root / "vllm/_C.abi3.so").unlink()


def gone(repository: Repository) -> None:
    shutil.rmtree(repository.root)


def unversioned(repository: Repository) -> None:
    shutil.rmtree(repository.root / ".git")


def hidden(repository: Repository) -> None:
    git(repository.root, "update-index", "--assume-unchanged", "vllm/__init__.py")
    changed(repository)


def exclude(repository: Repository, *patterns: str) -> None:
    (repository.root / ".git/info/exclude").write_text("\n".join(patterns) + "\n")


def link_to_a_folder(repository: Repository) -> None:
    exclude(repository, "vllm/ext")
    other = repository.root.parent / "elsewhere"
    other.mkdir()
    (other / "extra.py").write_text("")
    (repository.root / "vllm/ext").symlink_to(other)


def nested_repository(repository: Repository) -> None:
    exclude(repository, "vllm/third/")
    Repository(repository.root / "vllm/third", {"extra.py": ""}).write()


def byte_code_alone(repository: Repository) -> None:
    exclude(repository, "*.pyc")
    repository.put("vllm/extra.pyc", "")


def byte_code_unchecked(repository: Repository) -> None:
    exclude(repository, "__pycache__/")
    source = repository.root / "vllm/__init__.py"
    py_compile.compile(str(source), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (link_to_a_folder, "vllm/ext: found [0-9a-f]{64}, expected no such file, of what a build left there"),
        (nested_repository, r"vllm/third/extra\.py: found [0-9a-f]{64}, expected no such file"),
        (byte_code_alone, r"vllm/extra\.pyc: found [0-9a-f]{64}, expected no such file"),
        (
            byte_code_unchecked,
            r"__pycache__/__init__\.[a-z0-9-]+\.pyc: found byte code that is run without a look",
        ),
        (changed, "found changed or untracked files: vllm/__init__.py; expected none"),
        (staged, "found changed or untracked files: vllm/__init__.py; expected none"),
        (untracked, "found changed or untracked files: sitecustomize.py; expected none"),
        (removed, "found changed or untracked files: vllm/__init__.py; expected none"),
        (committed, "found commit [0-9a-f]{40}, expected [0-9a-f]{40}"),
        (rebuilt, "vllm/_C.abi3.so: found [0-9a-f]{64}, expected [0-9a-f]{64}, of what a build left there"),
        (generated, "vllm/_version.py: found [0-9a-f]{64}, expected no such file"),
        (unbuilt, "vllm/_C.abi3.so: found no such file, expected [0-9a-f]{64}"),
        (gone, "found no folder, expected a checkout of vllm"),
        (unversioned, "git rev-parse ended with|found a folder of the repository"),
        (hidden, "found the tree [0-9a-f]{64}, expected [0-9a-f]{64}: tracked files have other contents"),
    ],
)
def test_another_tree_is_refused_by_name(
    repository: Repository, study: Study, damage: Callable[[Repository], None], message: str
) -> None:
    """Each way in which a tree is not the declared one is one line with the arm, the checkout and what was found."""
    install = install_of(repository, study)
    damage(repository)
    with pytest.raises(InstallError, match=message) as caught:
        checkout.verify(install, "candidate")
    assert str(caught.value).startswith(f"arm candidate, checkout vllm {repository.root}")
    assert "\n" not in caught.value.line()


def test_a_submodule_is_part_of_the_tree(tmp_path: Path, study: Study) -> None:
    """A submodule counts with its files, must be at the commit that the tree has, and must be clean."""
    inner = Repository(tmp_path / "inner", {"lib.py": "1\n"}).write()
    outer = Repository(tmp_path / "stack" / "flashinfer", {"flashinfer/__init__.py": ""}).write()
    git(outer.root, "submodule", "add", "-q", str(inner.root), "3rdparty")
    outer.commit()
    install = install_of(outer, study)
    (found,) = checkout.verify(install, "candidate")
    assert "3rdparty/lib.py" in found.modules
    (outer.root / "3rdparty/lib.py").write_text("2\n")
    with pytest.raises(InstallError, match=r"found changed or untracked files: 3rdparty/lib\.py"):
        checkout.verify(install, "candidate")
    git(outer.root / "3rdparty", "commit", "-q", "-am", "m")
    with pytest.raises(InstallError, match="3rdparty: found the submodule at"):
        checkout.verify(install, "candidate")


def test_a_repositorys_own_configuration_runs_nothing(repository: Repository, study: Study, tmp_path: Path) -> None:
    """A program that the checkout's configuration names as its file monitor is not started."""
    install = install_of(repository, study)
    mark, program = tmp_path / "ran", tmp_path / "monitor"
    program.write_text(f"#!/bin/sh\ntouch {mark}\n")
    program.chmod(0o755)
    git(repository.root, "config", "core.fsmonitor", str(program))
    checkout.verify(install, "candidate")
    assert not mark.exists()


def test_ordinary_byte_code_is_no_change(repository: Repository, study: Study) -> None:
    """A boot leaves byte code that is compared with its source: the next look finds the same tree."""
    exclude(repository, "__pycache__/")
    install = install_of(repository, study)
    py_compile.compile(str(repository.root / "vllm/__init__.py"))
    checkout.verify(install, "candidate")


def test_a_tracked_link_is_no_module(repository: Repository) -> None:
    """What is imported through a link is the file that it leads to: the link itself has no contents to hash again."""
    (repository.root / "vllm/link.py").symlink_to("__init__.py")
    repository.commit()
    found = checkout.describe(repository.root, "vllm")
    assert found.files == 3
    assert found.modules.keys() == {"vllm/__init__.py", "vllm/_C.abi3.so"}


@pytest.mark.parametrize("arm", ["v1.2", "candidate"])
def test_the_printed_tables_can_be_read_for_any_name_of_an_arm(repository: Repository, arm: str) -> None:
    """A name with a dot in it is one key of the tables, not two."""
    text = "\n".join(checkout.checkout_lines(repository.root, "vllm", arm))
    assert tomllib.loads(text)["arms"][arm]["checkouts"]["vllm"]["commit"] == repository.head()


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.dictionaries(
        st.text("abc", min_size=1, max_size=3).map("vllm/{}.py".format),
        st.binary(min_size=0, max_size=20).filter(lambda data: b"\r" not in data),
        min_size=1,
        max_size=4,
    ),
    st.data(),
)
def test_one_byte_changes_the_tree(
    tmp_path_factory: pytest.TempPathFactory, files: dict[str, bytes], data: st.DataObject
) -> None:
    """The digest is the same for the same contents wherever they lie, and another one when any byte changes."""
    one, other = (Repository(tmp_path_factory.mktemp("r"), {}).write() for _ in range(2))
    for name, content in files.items():
        for each in (one, other):
            each.put(name, "")
            (each.root / name).write_bytes(content)
    one.commit(), other.commit()
    first = checkout.describe(one.root, "vllm")
    assert checkout.describe(other.root, "vllm").tree == first.tree
    name = data.draw(st.sampled_from(sorted(files)))
    place = data.draw(st.integers(0, len(files[name])))
    content = files[name]
    (other.root / name).write_bytes(content[:place] + b"!" + content[place:])
    other.commit()
    assert checkout.describe(other.root, "vllm").tree != first.tree


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("schema = 2\n[arms]\n", "in 'schema': found 2, expected 1"),
        ("schema = 1\n[arms.candidat]\n", "the arm 'candidat', expected one of native, reference, candidate"),
        ("schema = 1\n[arms.candidate]\n", "neither an interpreter nor a checkout"),
        ('schema = 1\n[arms.candidate]\ninterpreter = "none"\n', "no program .*/none"),
        (
            'schema = 1\n[arms.candidate.checkouts.torch]\npath="."\n',
            "the checkout 'torch', expected one of vllm, flash",
        ),
        ('schema = 1\n[arms.candidate.checkouts.vllm]\npath = "none"\n', "no folder .*/none"),
        ('schema = 1\n[arms.candidate.checkouts.vllm]\npath = "~no-such-user/x"\n', "no folder .*/~no-such-user/x"),
        ('schema = 1\n[arms.candidate.checkouts.vllm]\npath = "a:b"\n', "expected a path without ':'"),
        ('schema = 1\n[arms.candidate.checkouts.vllm]\npath = "."\ncommit = "v1"\n', "a commit of 40 hexadecimal"),
        ("schema = 1\narms = 3\n", "expected a table"),
        ("schema = ", "found no TOML"),
    ],
)
def test_a_malformed_install_is_one_line(tmp_path: Path, study: Study, text: str, message: str) -> None:
    """What is wrong with the file is named with its place."""
    (tmp_path / "a:b").mkdir()
    (tmp_path / checkout.INSTALL_FILE).write_text(text)
    with pytest.raises(InstallError, match=message) as caught:
        checkout.read_install(tmp_path, study)
    assert "\n" not in caught.value.line()


def test_no_install_file(tmp_path: Path, study: Study) -> None:
    """A folder without the file is one line."""
    with pytest.raises(InstallError, match=r"--install: cannot read .*kvqual-install\.toml: No such file"):
        checkout.read_install(tmp_path, study)


def test_the_checkout_comes_first_on_the_import_path(repository: Repository, study: Study) -> None:
    """The server of the arm imports from the checkout, with the arm's interpreter; that of another arm does not."""
    install = install_of(repository, study, extra=f'[arms.native]\ninterpreter = "{sys.executable}"')
    applied = checkout.apply(study, install)
    assert applied.arms["native"].interpreter == Path(sys.executable)
    for arm, expected in (("candidate", True), ("native", False)):
        selection = select(applied, arm=arm, length=16, cache_bytes=None)
        told = worker_config(selection, model=Path("/m"), checkouts=Path("/e/install.json") if expected else None)
        command = serve_command(
            selection, model=Path("/m"), port=1, worker_config=told, python=Path("python"), inherited={}
        )
        folders = command.env["PYTHONPATH"].split(":")
        assert (str(repository.root) in folders) is expected
        assert ("checkouts" in told) is expected
    assert checkout.apply(study, None) is study
