# SPDX-License-Identifier: Apache-2.0
"""Say from traces whether and where a program would hang, and what helps: `torchcommshim explain`.

Exit codes: 0 if all is fine; 1 if something would hang, raise or sum wrongly; 2 for bad input; 130 if
interrupted.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from torchcommshim.commands.explain import explanation, fake, picture
from torchcommshim.commands.explain.program import AUTO, WORLDS, sequences, take
from torchcommshim.commands.explain.releases import salt_of, traits_of
from torchcommshim.commands.explain.traces import BadTraces, Job, check_complete, choose, read
from torchcommshim.commands.explain.verdicts import STRATEGIES, WITHOUT, play
from torchcommshim.repair.splits import COUNTER, OK
from torchcommshim.repair.traits import Traits


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add explain's options to a parser."""
    parser.usage = "%(prog)s DIR [options]\n       %(prog)s --fake --world-size N [options] -- COMMAND ..."
    parser.add_argument("words", nargs="*", metavar="DIR", help="folder that TORCHCOMMSHIM_TRACE has filled")
    parser.add_argument(
        "--torch", metavar="VERSION", help="explain for this release, 2.3.0 to 2.15 (the traced one)"
    )
    parser.add_argument(
        "--strategy",
        choices=STRATEGIES,
        default=WITHOUT,
        help="whose details are shown, and whose verdict is the exit code; off is without the shim (off)",
    )
    parser.add_argument(
        "--world",
        choices=WORLDS,
        default=AUTO,
        help="; ".join(f"{name}: {meaning}" for name, meaning in WORLDS.items()) + f" ({AUTO})",
    )
    parser.add_argument("--job", metavar="NAME", help="which job, where the folder holds several")
    parser.add_argument(
        "--partial",
        action="store_true",
        help="assume what is missing where ranks have no trace, or a cut one",
    )
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw which splits pair up")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    fake.add_arguments(parser.add_argument_group("dry run, without GPUs and without other processes"))


def main(chosen: argparse.Namespace) -> int:
    """Explain; returns the exit code."""
    try:
        _check_before(chosen)
        if chosen.fake:
            with fake.traced(chosen) as (folder, ended):
                return _explain(chosen, folder, ended)
        fake.refuse_options(chosen)
        if len(chosen.words) != 1:
            raise BadTraces("one folder with traces is needed; or --fake --world-size N -- COMMAND ...")
        return _explain(chosen, Path(chosen.words[0]), ended=[])
    except (BadTraces, fake.BadCommand) as error:
        sys.stderr.write(f"torchcommshim explain: {error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("torchcommshim explain: interrupted; all ranks are ended\n")
        return 130


def _check_before(chosen: argparse.Namespace) -> None:
    """Refuse what could not be followed after long runs."""
    try:
        if chosen.torch is not None:
            traits_of(chosen.torch)
    except ValueError as error:
        raise BadTraces(f"--torch: {error}") from None
    if chosen.svg:
        _write(chosen.svg, "", mode="a")


def _explain(chosen: argparse.Namespace, folder: Path, ended: list[int]) -> int:
    job = choose(read(folder), chosen.job)
    if chosen.partial:
        job.drop(job.behind(ended))
    else:
        check_complete(job, ended)
    torch, traits, salt = _build(job, chosen.torch)
    taken = take(job, chosen.world, traits)
    ranks = sequences(job, taken)
    try:
        verdicts = {name: play(ranks, traits, salt, name) for name in STRATEGIES}
    except ValueError as error:
        raise BadTraces(f"the traces make no program: {error}") from None
    found = explanation.document(job, taken, ranks, traits, torch, verdicts.values())
    if chosen.svg:
        _write(chosen.svg, picture.draw(verdicts[chosen.strategy], torch))
    print(json.dumps(found, indent=2) if chosen.json else explanation.as_text(found, chosen.strategy))
    return 0 if verdicts[chosen.strategy].verdict == OK else 1


def _build(job: Job, asked: str | None) -> tuple[str, Traits, str]:
    """The build of torch to explain for: its version, its traits, and the salt of its local names."""
    if asked is not None:
        return asked, traits_of(asked), salt_of(asked)
    traced: dict[str, Any] = job.first.world
    try:
        traits = Traits(**traced["traits"])
    except TypeError as error:
        raise BadTraces(f"{job.first.file.name}: its traits are of another torchcommshim: {error}") from None
    try:
        return traced["torch"], traits, salt_of(traced["torch"])
    except ValueError:  # a build from between releases
        return traced["torch"], traits, COUNTER


def _write(file: Path, text: str, mode: str = "w") -> None:
    try:
        with open(file, mode, encoding="utf-8") as stream:
            stream.write(text)
    except OSError as error:
        raise BadTraces(f"--svg {file}: {error.strerror}") from error
