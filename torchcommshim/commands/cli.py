# SPDX-License-Identifier: Apache-2.0
"""The command line: `torchcommshim verify | doctor | explain | where | run | path`."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Sequence

import torchcommshim
from torchcommshim.commands import doctor, environment, explain, verify, where


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="torchcommshim", description=torchcommshim.__doc__.splitlines()[0])
    parser.add_argument("--version", action="version", version=torchcommshim.__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    checking = commands.add_parser(
        "verify", help="show each defect without and with the shim, on this machine"
    )
    verify.add_arguments(checking)
    checking.set_defaults(action=verify.main)

    examining = commands.add_parser("doctor", help="say what is armed, by what, and what this torch needs")
    doctor.add_arguments(examining)
    examining.set_defaults(action=doctor.main)

    explaining = commands.add_parser(
        "explain", help="say from traces whether and where a program would hang, and what helps"
    )
    explain.add_arguments(explaining)
    explaining.set_defaults(action=explain.main)

    looking = commands.add_parser("where", help="say where every rank of a running job is")
    where.add_arguments(looking)
    looking.set_defaults(action=where.main)

    running = commands.add_parser("run", help="run a command with the shim", usage="%(prog)s -- COMMAND ...")
    running.add_argument("words", nargs=argparse.REMAINDER, metavar="COMMAND ...")
    running.set_defaults(action=_run)

    locating = commands.add_parser("path", help="print the folder to put first on PYTHONPATH")
    locating.set_defaults(action=_path)

    chosen = parser.parse_args(arguments)
    try:
        code = int(chosen.action(chosen))
        sys.stdout.flush()
    except OSError as error:
        if not isinstance(error, BrokenPipeError):  # `| head`: that nobody reads on is no error to report
            sys.stderr.write(f"torchcommshim {chosen.command}: {error}\n")
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what Python flushes at its end would fail again
        return 1
    return code


def _run(chosen: argparse.Namespace) -> int:
    words = chosen.words[1:] if chosen.words[:1] == ["--"] else chosen.words
    if not words:
        sys.stderr.write("torchcommshim run: no command given; usage: torchcommshim run -- COMMAND ...\n")
        return 2
    try:
        os.execvpe(words[0], words, environment.with_shim(os.environ))
    except OSError as error:  # the codes that shells use
        sys.stderr.write(f"torchcommshim run: {words[0]}: {error.strerror}\n")
        return 127 if isinstance(error, FileNotFoundError) else 126


def _path(chosen: argparse.Namespace) -> int:
    print(environment.sitecustomize_folder())
    return 0
