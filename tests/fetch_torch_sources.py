# SPDX-License-Identifier: Apache-2.0
"""The source of `torch.distributed.distributed_c10d` of any torch release, taken from its macOS wheel.

The macOS wheels are the small ones.  One file is read from a wheel, nothing of it is installed or run:

    python tests/fetch_torch_sources.py             # all releases; shows where the files lie
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

CACHE = Path(__file__).resolve().parent.parent / ".cache" / "torch-sources"
MEMBER = "torch/distributed/distributed_c10d.py"

# Every final release from the first with `init_process_group(device_id=...)` to the newest when this
# was written; `newest()` asks the package index for later ones.
RELEASES = (
    *("2.3.0", "2.3.1", "2.4.0", "2.4.1", "2.5.0", "2.5.1", "2.6.0", "2.7.0", "2.7.1", "2.8.0", "2.9.0"),
    *("2.9.1", "2.10.0", "2.11.0", "2.12.0", "2.12.1", "2.13.0", "2.14.0", "2.14.1", "2.15.0"),
)


def source(version: str) -> str:
    """The text of distributed_c10d.py of one release, from the cache if it is there.

    Raises:
        RuntimeError: the package index has no such wheel, or cannot be reached.
    """
    kept = CACHE / version / "distributed_c10d.py"
    if not kept.exists():
        with tempfile.TemporaryDirectory() as folder:
            _pip("download", "--quiet", "--no-deps", "--dest", folder, *_MACOS, f"torch=={version}")
            (wheel,) = Path(folder).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                text = archive.read(MEMBER)
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_bytes(text)
    return kept.read_text(encoding="utf-8")


def newest() -> str:
    """The newest final release of torch that the package index has."""
    listed = _pip("index", "versions", *_MACOS, "torch")
    found = re.search(r"^torch \((.+)\)", listed, re.MULTILINE)
    if found is None:
        raise RuntimeError(f"pip index versions torch: no version in {listed!r}")
    return found.group(1)


_MACOS = (
    *("--only-binary=:all:", "--implementation", "cp", "--python-version", "3.12"),
    *(option for major in range(11, 16) for option in ("--platform", f"macosx_{major}_0_arm64")),
)


def _pip(*arguments: str) -> str:
    # A constraint that keeps a machine from installing some torch does not concern us: nothing is installed.
    environment = {**os.environ, "PIP_CONSTRAINT": os.devnull}
    done = subprocess.run(
        [sys.executable, "-m", "pip", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"pip {' '.join(arguments)} failed:\n{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    for release in (*RELEASES, newest()):
        source(release)
        print(CACHE / release / "distributed_c10d.py")
