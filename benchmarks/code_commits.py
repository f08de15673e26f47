"""Finds the commits whose package has the hashes that rows were recorded with, for tables/costs.md.

    python benchmarks/code_commits.py docs/results/second

Where rows are trained there may be no history, so that their records have a hash of the package's files alone. Writes
commits.json; of several commits with the same files, the first one is named.
"""

from __future__ import annotations

import hashlib
import io
import subprocess
import tarfile
from pathlib import Path, PurePosixPath

import tyro

from diffusionbert.storage.files import read_json, write_json

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "src/diffusionbert"


def find(kept: tyro.conf.Positional[Path]) -> None:
    """Write the commit of each recorded hash."""
    wanted = {read_json(path)["code"] for path in kept.glob("*/seconds/*.json")}
    found = dict[str, str]()
    for commit in _git("log", "--format=%H", "--", PACKAGE).decode().split():
        if (own := package_hash(commit)) in wanted:
            found[own] = commit  # an earlier one replaces it
        elif wanted <= found.keys():
            break
    for missing in sorted(wanted - found.keys()):
        print(f"no commit has the package {missing}")
    write_json(kept / "commits.json", dict(sorted(found.items())))


def package_hash(commit: str) -> str:
    """What `code_version` computes, for the package of a commit."""
    with tarfile.open(fileobj=io.BytesIO(_git("archive", commit, PACKAGE))) as archive:
        names = {PurePosixPath(name).relative_to(PACKAGE): name for name in archive.getnames() if name.endswith(".py")}
        digest = hashlib.sha256()
        for path in sorted(names):
            file = archive.extractfile(names[path])
            assert file is not None
            digest.update(f"{path.as_posix()}\n".encode() + file.read())
    return digest.hexdigest()


def _git(*arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=True).stdout


if __name__ == "__main__":
    tyro.cli(find, description=__doc__)
