# SPDX-License-Identifier: Apache-2.0
"""`explain --fake`: trace a script as each rank of a world that is not there."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torchcommshim import settings
from torchcommshim.commands import environment
from torchcommshim.commands.options import positive
from torchcommshim.ranges import named

LIMIT_S = 300.0
QUIET_S = 10.0
_STOP_S = 15  # from closing the launcher's standard input to killing it
_LAUNCH = "from torchcommshim.commands.explain.launch import main; main()"
_TAIL = 6  # lines of a failed rank's stderr

# What says that a script wanted a GPU.
_WANTED_GPU = (
    "NVIDIA driver",
    "not compiled with CUDA",
    "_cuda_setDevice",
    "CUDA-capable",
    "No CUDA GPUs",
    "invalid device ordinal",
)


class BadCommand(Exception):
    """The dry run cannot be made; the message says why."""


def add_arguments(parser: argparse._ArgumentGroup) -> None:
    """The dry run's options."""
    parser.add_argument(
        "--fake", action="store_true", help="run COMMAND (a Python script, or python ...) once for each rank"
    )
    parser.add_argument("--world-size", type=positive(int), metavar="N", help="how many ranks")
    parser.add_argument("--jobs", type=positive(int), metavar="N", help="how many run at a time (the CPUs)")
    parser.add_argument(
        "--limit", type=positive(float), metavar="SECONDS", help=f"end a rank after that ({LIMIT_S:g})"
    )
    parser.add_argument(
        "--quiet",
        type=positive(float),
        metavar="SECONDS",
        help=f"end a rank that has made a group, and then none for that long ({QUIET_S:g})",
    )
    parser.add_argument("--keep", type=Path, metavar="DIR", help="leave the traces in DIR")


def refuse_options(chosen: argparse.Namespace) -> None:
    """Raise BadCommand if an option of the dry run is given without `--fake`."""
    for name in ("world_size", "jobs", "limit", "quiet", "keep"):
        if getattr(chosen, name) is not None:
            raise BadCommand(f"--{name.replace('_', '-')} goes with --fake")


@contextmanager
def traced(chosen: argparse.Namespace) -> Iterator[tuple[Path, list[int]]]:
    """Run the command as each rank, and say on stderr what became of the runs.

    Gives the folder of traces, for as long as it is there, and the ranks that failed or had to be ended.

    Raises:
        BadCommand: it cannot be run, or made no group.
    """
    if chosen.world_size is None:
        raise BadCommand("--fake needs --world-size")
    interpreter, words = _split(chosen.words)
    with tempfile.TemporaryDirectory(prefix="torchcommshim-explain-") as scratch:
        folder = chosen.keep or Path(scratch) / "traces"
        _make_empty(folder)
        spec = {
            "folder": scratch,
            "size": chosen.world_size,
            "jobs": chosen.jobs or os.cpu_count() or 1,
            "limit_s": chosen.limit or LIMIT_S,
            "quiet_s": chosen.quiet or QUIET_S,
            "words": words,
        }
        ended = list(_run(interpreter, spec, folder))
        _say_what_became(ended, Path(scratch), chosen)
        if not any(folder.iterdir()):
            raise BadCommand("no rank came as far as init_process_group, so there is nothing to explain")
        yield folder, [each["rank"] for each in ended if each["how"] != "exit" or each["code"]]


def _split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The interpreter with its options, and the script or `-m` module with its arguments."""
    rest = list(words[1:] if words[:1] == ["--"] else words)
    if not rest:
        raise BadCommand("no command given; usage: --fake --world-size N -- python SCRIPT ...")
    interpreter = [sys.executable]
    if Path(rest[0]).name.startswith("python"):
        found = shutil.which(rest[0])
        if found is None:
            raise BadCommand(f"{rest[0]}: no such interpreter")
        interpreter = [found]
        del rest[0]
        while rest and rest[0].startswith("-") and rest[0] not in ("-", "-m", "-c"):
            takes_value = rest[0] in ("-W", "-X")
            interpreter += rest[: 1 + takes_value]
            del rest[: 1 + takes_value]
    if not rest or (rest[0] == "-m" and not rest[1:]) or rest[0] in ("-", "-c"):
        raise BadCommand("the command must name a Python script, or a module with -m")
    if rest[0] != "-m" and not Path(rest[0]).is_file():
        raise BadCommand(
            f"{rest[0]}: no such script; give a Python script, and not what launches it (torchrun, srun)"
        )
    return interpreter, rest


def _make_empty(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise BadCommand(f"--keep {folder}: it is not empty")
    except OSError as error:
        raise BadCommand(f"--keep {folder}: {error.strerror}") from error


def _run(interpreter: list[str], spec: dict[str, Any], folder: Path) -> Iterator[dict[str, Any]]:
    """Start the launcher; yields how each rank ended, as it does.  Leaves no process behind."""
    log = Path(spec["folder"]) / "launcher"
    with open(log, "wb") as errors:
        launcher = subprocess.Popen(
            [*interpreter, "-c", _LAUNCH, json.dumps(spec)],
            env=_environment(os.environ, folder),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,  # Ctrl-C is for us: closing the pipe passes it on
        )
    assert launcher.stdin
    assert launcher.stdout
    count = 0
    try:
        for line in launcher.stdout:
            if not line.startswith(b'{"rank"'):  # something that Python's start-up prints
                continue
            count += 1
            _progress(f"{count}/{spec['size']} ranks")
            yield json.loads(line)
        launcher.wait()
    finally:
        _end_progress()
        launcher.stdin.close()
        try:
            launcher.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(launcher.pid, signal.SIGKILL)  # its ranks die with it
            launcher.wait()
        launcher.stdout.close()
    if launcher.returncode or count < spec["size"]:
        words = log.read_text(errors="replace").strip().splitlines()
        raise BadCommand(f"{interpreter[0]}: {words[-1] if words else 'it ended without a word'}")


def _environment(outside: Any, folder: Path) -> dict[str, str]:
    """The ranks' environment: the shim looks on and writes the trace, and does nothing else."""
    values = {name: value for name, value in outside.items() if name not in settings.VARIABLES}
    values.update(
        {
            settings.STRATEGY: "observe",
            settings.AGREEMENT: "off",
            settings.CHECK_ORDER: "off",
            settings.HANG_REPORT_S: "0",
            settings.TRACE: str(folder.absolute()),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29500",
            "TORCHELASTIC_RUN_ID": f"fake-{uuid.uuid4().hex[:8]}",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "OMP_NUM_THREADS": "1",
        }
    )
    return environment.with_checkout(values)


def _say_what_became(ended: list[dict[str, Any]], scratch: Path, chosen: argparse.Namespace) -> None:
    by_end: dict[str, list[int]] = defaultdict(list)
    failed: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for each in ended:
        if each["how"] == "exit" and each["code"]:
            text = (scratch / f"{each['rank']}.stderr").read_text(errors="replace")
            tail = text.strip().splitlines()[-_TAIL:]
            failed[(f"exit code {each['code']}", *tail)].append(each["rank"])
        else:
            by_end[each["how"]].append(each["rank"])
    for how, meaning in (
        ("limit", f"ended after {chosen.limit or LIMIT_S:g} s (--limit)"),
        ("quiet", f"ended, since no group came for {chosen.quiet or QUIET_S:g} s (--quiet)"),
    ):
        if by_end[how]:
            _say(f"{named(by_end[how])}: {meaning}")
    # Ranks that fail alike differ in little but their own numbers: of some of them one is shown.
    for (code, *tail), ranks in list(failed.items())[:4]:
        _say(f"{named(ranks)} failed, {code}; stderr " + ("ends with:" if tail else "is empty"))
        for line in tail:
            sys.stderr.write(f"    {line}\n")
        if any(hint in line for line in tail for hint in _WANTED_GPU):
            sys.stderr.write(
                "    The script wants a GPU before it makes its groups, and there is none for it here: a "
                "dry run needs\n    what the script needs. One GPU is enough: each rank gets LOCAL_RANK=0.\n"
            )
    if len(failed) > 4:
        others = [rank for ranks in list(failed.values())[4:] for rank in ranks]
        _say(f"{named(others)} failed in other ways")


def _say(text: str) -> None:
    sys.stderr.write(f"torchcommshim explain: {text}\n")


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\033[K{text}")
        sys.stderr.flush()


def _end_progress() -> None:
    if sys.stderr.isatty():
        sys.stderr.write("\r\033[K")
