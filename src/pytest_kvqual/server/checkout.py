"""Arms from an install: which source trees an arm runs, and that each is exactly the declared one.

``DIR/kvqual-install.toml``, with paths relative to ``DIR``::

    schema = 1

    [arms.candidate]
    interpreter = "venv/bin/python"      # left out: the one that runs pytest

    [arms.candidate.checkouts.vllm]      # vllm, flashinfer
    path = "vllm-candidate"
    commit = "…"                         # 40 hexadecimal digits
    tree = "…"                           # SHA-256 over the tracked files' contents

    [arms.candidate.checkouts.vllm.built]    # what a build left there that git ignores and Python can import
    "vllm/_C.abi3.so" = "…"              # its SHA-256

``kvqual checkout PATH`` prints the last two tables as they are now. An arm that the file does not name runs as the
study declares it.

A tree is the declared one when its commit is, when git finds nothing changed and no untracked file in it, when the
digest over its tracked files is, and when what can be imported of its ignored files is exactly ``built``. The digest is
over contents, read anew each time: git's own view of what changed goes by the times of files. What git ignores is
looked for on the disk: git neither enters a repository inside the tree nor follows a link to a folder.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pytest_kvqual._canonical import sha256_bytes, sha256_file, tree_digest
from pytest_kvqual._decode import Table, nearest, one_line
from pytest_kvqual.errors import InstallError

if TYPE_CHECKING:
    from pytest_kvqual.study.model import Study

__all__ = [
    "INSTALL_FILE",
    "NAMES",
    "Checkout",
    "Found",
    "Install",
    "InstalledArm",
    "apply",
    "checkout_lines",
    "describe",
    "read_install",
    "verify",
]

SCHEMA: Final = 1
INSTALL_FILE: Final = "kvqual-install.toml"
#: The projects of which an arm may bring a checkout, in the order in which they stand on the import path.
NAMES: Final = ("vllm", "flashinfer")

_COMMIT = r"[0-9a-f]{40}"
_LIMIT_S: Final = 300.0
_SUBMODULE: Final = "160000"
_LINK: Final = "120000"
#: What Python imports from a folder of the import path; byte code too, where it lies beside no source.
_CODE: Final = (".py", ".so", ".pyc")
_CACHE: Final = "__pycache__"
_SHOWN: Final = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkout:
    """One declared source tree. ``built`` maps each importable file that git ignores to its SHA-256."""

    name: str
    path: Path
    commit: str
    tree: str
    built: Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class InstalledArm:
    """Interpreter and checkouts of one arm; ``interpreter`` is None for the one that runs pytest."""

    interpreter: Path | None
    checkouts: tuple[Checkout, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Install:
    """A ``kvqual-install.toml``, read. ``path`` is the file, ``arms`` what it says of each arm that it names."""

    path: Path
    arms: Mapping[str, InstalledArm]


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What a checkout is: its commit, the digest over its tracked files, and the SHA-256 of each importable file.

    ``files`` is the number of tracked files, those of submodules too. ``built`` has links to folders beside importable
    files. ``modules`` maps the path of each file that Python can import, tracked or ``built``, to its digest; a tracked
    link is none, since what is imported is the file that it leads to.
    """

    name: str
    path: Path
    commit: str
    tree: str
    files: int
    built: Mapping[str, str]
    modules: Mapping[str, str]

    def identity(self) -> dict[str, object]:
        """What tells this checkout from another one, JSON-ready; without its place."""
        return {"name": self.name, "commit": self.commit, "tree": self.tree, "built": dict(self.built)}

    def record(self) -> dict[str, object]:
        """All of it, JSON-ready."""
        return {**self.identity(), "path": str(self.path), "files": self.files, "modules": dict(self.modules)}


def read_install(directory: Path, study: Study) -> Install:
    """The install in a folder, for the arms of a study. Reads no checkout.

    Raises:
        InstallError: No file, or one that does not parse; an unknown key or arm; a path that is not there; an
            interpreter that is no program.
    """
    import tomllib

    path = directory / INSTALL_FILE
    try:
        document = tomllib.loads(path.read_bytes().decode("utf-8"))
    except OSError as error:
        raise InstallError(
            f"--install: cannot read {path}: {error.strerror}", advice="docs/writing-an-arm.md says what it holds"
        ) from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InstallError(one_line(f"{path}: found no TOML: {error}")) from None
    top = Table(document, origin=str(path), error=InstallError, known=("schema", "arms"))
    if top.integer("schema") != SCHEMA:
        top.fail("schema", str(top.integer("schema")), str(SCHEMA))
    tables = top.named_tables("arms", known=("interpreter", "checkouts"))
    arms = {}
    for name, table in tables.items():
        if name not in study.arms:
            top.fail("arms", f"the arm '{name}'", f"one of {', '.join(study.arms)}, those of study {study.name}",
                     advice=nearest(name, study.arms))  # fmt: skip
        arms[name] = _arm(table, directory)
    return Install(path=path, arms=arms)


def _arm(table: Table, directory: Path) -> InstalledArm:
    interpreter = None
    if table.has("interpreter"):
        interpreter = _absolute(table.string("interpreter"), directory)
        if not interpreter.is_file() or not os.access(interpreter, os.X_OK):
            table.fail("interpreter", f"no program {interpreter}", "a Python interpreter")
    tables = (
        table.named_tables("checkouts", known=("path", "commit", "tree", "built")) if table.has("checkouts") else {}
    )
    if interpreter is None and not tables:
        table.fail("", "neither an interpreter nor a checkout", "one of them")
    for name in tables:
        if name not in NAMES:
            table.fail("checkouts", f"the checkout '{name}'", f"one of {', '.join(NAMES)}")
    checkouts = []
    for name in NAMES:
        if name in tables:
            inner = tables[name]
            path = _absolute(inner.string("path"), directory)
            if not path.is_dir():
                inner.fail("path", f"no folder {path}", f"the checkout of {name}")
            if os.pathsep in str(path):
                inner.fail("path", str(path), f"a path without '{os.pathsep}', which parts the folders of PYTHONPATH")
            checkouts.append(
                Checkout(
                    name=name,
                    path=path,
                    commit=inner.string("commit", pattern=_COMMIT, form="a commit of 40 hexadecimal digits"),
                    tree=inner.sha256("tree"),
                    built=inner.sha256_map("built") if inner.has("built") else {},
                )
            )
    return InstalledArm(interpreter=interpreter, checkouts=tuple(checkouts))


def _absolute(name: str, directory: Path) -> Path:
    # Not resolved: an environment's interpreter is a link, and is the environment's by its own path.
    # Path.expanduser raises where nobody has that name.
    return Path(os.path.normpath(directory / os.path.expanduser(name)))  # noqa: PTH111


def apply(study: Study, install: Install | None) -> Study:
    """The study with interpreter and checkouts of the install's arms; the arms that it does not name are unchanged."""
    if install is None:
        return study
    arms = dict(study.arms)
    for name, installed in install.arms.items():
        arm = arms[name]
        arms[name] = replace(
            arm,
            interpreter=installed.interpreter if installed.interpreter is not None else arm.interpreter,
            checkouts=tuple(checkout.path for checkout in installed.checkouts),
        )
    return replace(study, arms=arms)


def verify(install: Install, arm: str) -> tuple[Found, ...]:
    """Look at each checkout of an arm, and hold it against what the install declares.

    Raises:
        InstallError: One is missing, no repository, at another commit, dirty, or has other contents; names the arm, the
            checkout, and the first files.
    """
    installed = install.arms.get(arm)
    return tuple(_verified(checkout, arm) for checkout in installed.checkouts) if installed is not None else ()


def _verified(declared: Checkout, arm: str) -> Found:
    what = f"arm {arm}, checkout {declared.name} {declared.path}"
    advice = f"check out {declared.commit[:12]} there without changes, or declare what is there: kvqual checkout"
    found = describe(declared.path, declared.name, what=what, commit=declared.commit)
    if found.tree != declared.tree:
        raise InstallError(
            f"{what}: found the tree {found.tree}, expected {declared.tree}: tracked files have other contents",
            advice=advice,
        )
    for path in sorted(found.built.keys() | declared.built.keys()):
        here, expected = found.built.get(path, "no such file"), declared.built.get(path, "no such file")
        if here != expected:
            raise InstallError(
                one_line(f"{what}: {path}: found {here}, expected {expected}, of what a build left there"),
                advice="declare it under 'built' (kvqual checkout prints it), or remove it",
            )
    return found


def describe(path: Path, name: str, *, what: str | None = None, commit: str | None = None) -> Found:
    """What a checkout is now.

    Args:
        path: Its root.
        name: Its name in an install.
        what: What errors call it; default its path.
        commit: The commit that it must be at; None for any.

    Raises:
        InstallError: It is not the root of a repository, at another commit, or dirty.
    """
    what = what or str(path)
    if not path.is_dir():
        raise InstallError(f"{what}: found no folder, expected a checkout of {name}")
    root = _git(path, what, "rev-parse", "--show-toplevel").removesuffix("\n")
    if Path(root).resolve() != path.resolve():
        raise InstallError(
            f"{what}: found a folder of the repository {root}, expected the root of a checkout of {name}"
        )
    head = _git(path, what, "rev-parse", "--verify", "HEAD^{commit}").strip()
    if commit is not None and head != commit:
        raise InstallError(f"{what}: found commit {head}, expected {commit}", advice="check out the declared commit")
    files: dict[str, str] = {}
    links: set[str] = set()
    _walk(path, "", what, files, links)
    built = _built(path, what, files)
    modules = {
        name: digest for name, digest in {**files, **built}.items() if name.endswith(_CODE) and name not in links
    }
    return Found(
        name=name, path=path, commit=head, tree=tree_digest(files), files=len(files), built=built, modules=modules
    )


def _walk(root: Path, prefix: str, what: str, files: dict[str, str], links: set[str]) -> None:
    """The digests of a repository's tracked files, those of its submodules too, and which of them are links.

    Raises:
        InstallError: Something in it is changed, staged or untracked.
    """
    # Submodules are walked on their own, with their untracked files.
    status = _git(
        root, what, "status", "--porcelain=v1", "-z", "--no-renames", "--untracked-files=all", "--ignore-submodules=all"
    )
    dirty = [prefix + entry[3:] for entry in status.split("\0") if entry]
    if dirty:
        more = f", and {len(dirty) - _SHOWN} more" if len(dirty) > _SHOWN else ""
        raise InstallError(
            one_line(f"{what}: found changed or untracked files: {', '.join(dirty[:_SHOWN])}{more}; expected none"),
            advice="commit, stash or remove them, and declare the commit",
        )
    for entry in _git(root, what, "ls-files", "--stage", "-z").split("\0"):
        if not entry:
            continue
        head, _, name = entry.partition("\t")
        mode, blob, _ = head.split(" ")
        if mode == _SUBMODULE:
            inner = _git(root / name, what, "rev-parse", "--verify", "HEAD^{commit}").strip()
            if inner != blob:
                raise InstallError(
                    f"{what}: {prefix}{name}: found the submodule at {inner}, expected {blob}, as the commit has it",
                    advice="git submodule update --init --recursive",
                )
            _walk(root / name, f"{prefix}{name}/", what, files, links)
        else:
            files[prefix + name] = _digest(root / name, what, link=mode == _LINK)
            if mode == _LINK:
                links.add(prefix + name)


def _built(root: Path, what: str, files: Mapping[str, str]) -> dict[str, str]:
    """The digests of what can be imported and is not tracked: files, and links to folders.

    Raises:
        InstallError: A cache has byte code that is run whatever its source says.
    """
    found: dict[str, str] = {}
    tracked = {name.partition("/")[0] for name in files}
    for place, folders, names in os.walk(root):
        inside = Path(place)
        prefix = "" if inside == root else f"{inside.relative_to(root).as_posix()}/"
        if inside.name == _CACHE:
            _refuse_unchecked(inside, names, what, prefix)
            folders.clear()
            continue
        for name in folders:
            if (inside / name).is_symlink() and prefix + name not in files and (prefix or name in tracked):
                found[prefix + name] = _digest(inside / name, what, link=True)
        # An ignored folder at the root, as of an environment or a build, is no part of a package that is tracked; what
        # is imported from there anyway is traced to no file, and the gate identity names it.
        folders[:] = [name for name in folders if name != ".git" and (prefix or name in tracked or name == _CACHE)]
        for name in names:
            if name.endswith(_CODE) and prefix + name not in files:
                found[prefix + name] = _digest(inside / name, what, link=False)
    return found


def _refuse_unchecked(cache: Path, names: list[str], what: str, prefix: str) -> None:
    for name in names:
        if not name.endswith(".pyc"):
            continue
        try:
            with (cache / name).open("rb") as file:
                head = file.read(8)
        except OSError as error:
            raise InstallError(f"{what}: cannot read {cache / name}: {error.strerror or error}") from None
        # PEP 552: bit 0, that the hash of the source stands there; bit 1, that it is compared with the source.
        if len(head) == 8 and int.from_bytes(head[4:], "little") & 3 == 1:
            raise InstallError(
                one_line(f"{what}: {prefix}{name}: found byte code that is run without a look at its source"),
                advice=f"remove the folders {_CACHE} of the checkout",
            )


def _digest(path: Path, what: str, *, link: bool) -> str:
    try:
        return sha256_bytes(b"link:" + os.fsencode(path.readlink())) if link else sha256_file(path)
    except OSError as error:
        raise InstallError(f"{what}: cannot read {path}: {error.strerror or error}") from None


def _git(root: Path, what: str, *arguments: str) -> str:
    # Nothing of the user's configuration, and no program that the checkout's own names, has a say in what is found.
    command = ["git", "-c", "safe.directory=*", "-c", "core.fsmonitor=false", "-c", "core.quotePath=false",
               "-c", "core.excludesFile=/dev/null", "-C", str(root), *arguments]  # fmt: skip
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    env = inherited | {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
    try:
        done = subprocess.run(command, capture_output=True, timeout=_LIMIT_S, check=False, env=env)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InstallError(f"{what}: cannot run git: {one_line(str(error))}", advice="install git") from None
    if done.returncode != 0:
        told = (done.stderr.decode(errors="replace").strip().splitlines() or ["no message"])[-1]
        raise InstallError(one_line(f"{what}: git {arguments[0]} ended with {done.returncode}: {told}"),
                           advice="name the root of a git checkout")  # fmt: skip
    return done.stdout.decode("utf-8", errors="surrogateescape")


def checkout_lines(path: Path, name: str, arm: str) -> tuple[str, ...]:
    """What ``kvqual checkout`` prints: the tables of one checkout as it is now, for a ``kvqual-install.toml``.

    Raises:
        InstallError: As :func:`describe`.
    """
    found = describe(path.absolute(), name)
    lines = [
        f"[arms.{_key(arm)}.checkouts.{name}]",
        f"path = {_quoted(str(found.path))}",
        f'commit = "{found.commit}"',
        f'tree = "{found.tree}"',
    ]
    if found.built:
        lines += [f"[arms.{_key(arm)}.checkouts.{name}.built]"]
        lines += [f'{_quoted(file)} = "{digest}"' for file, digest in sorted(found.built.items())]
    return tuple(lines)


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _quoted(name)


def _quoted(text: str) -> str:
    import json

    # A JSON string is a TOML basic string.
    return json.dumps(text)
