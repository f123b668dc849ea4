"""Throw-away git repositories, and an install that names them."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path


def git(root: Path, *arguments: str) -> str:
    """Run git without anybody's configuration."""
    env = {
        "PATH": os.environ["PATH"],
        "HOME": str(root),
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_SYSTEM": os.devnull,
        **{f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")},
    }
    command = ["git", "-c", "protocol.file.allow=always", "-C", str(root), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, env=env).stdout


@dataclass
class Repository:
    """A repository with a package in it, committed."""

    root: Path
    files: dict[str, str] = field(
        default_factory=lambda: {"vllm/__init__.py": "", ".gitignore": "*.so\n*_version.py\n"}
    )

    def write(self) -> Repository:
        self.root.mkdir(parents=True, exist_ok=True)
        git(self.root, "init", "-q")
        for name, text in self.files.items():
            self.put(name, text)
        self.commit()
        return self

    def put(self, name: str, text: str) -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def commit(self) -> str:
        git(self.root, "add", "-A")
        git(self.root, "commit", "-q", "--allow-empty", "-m", "m")
        return self.head()

    def head(self) -> str:
        return git(self.root, "rev-parse", "HEAD").strip()
