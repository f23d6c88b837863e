# SPDX-License-Identifier: Apache-2.0
"""`torchcommshim doctor`: what is armed here, by what, and what this torch needs."""

from __future__ import annotations

import argparse
import importlib
import importlib.machinery
import json
import os
import platform
import site
import sys
from pathlib import Path
from types import FunctionType
from typing import Any

import torchcommshim
from torchcommshim import settings
from torchcommshim.commands import environment
from torchcommshim.repair import defects
from torchcommshim.repair.policy import INDEPENDENT, SPLIT_NOW, decide
from torchcommshim.repair.traits import OPTIONAL, WRAPPED, Traits, code_of_module, probe, release
from torchcommshim.tell import report

C10D = "torch.distributed.distributed_c10d"
_REMEDIES = {
    INDEPENDENT: "independent: the group is made without splitting from the world",
    SPLIT_NOW: "split_now: members split at once, together with the non-members",
}
# What was measured on torch 2.11.0, 4 ranks on one H200; a test holds it to docs/performance.json.
SENDS_BESIDE_AN_ALL_REDUCE = (
    "14 ms of sends beside an all-reduce of 57 ms took 69 ms; without device_id, 57 ms"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def main(chosen: argparse.Namespace) -> int:
    """Examine and print; 0 if the shim is in place here or switched off on purpose, else 1."""
    findings = examine()
    print(json.dumps(findings, indent=2) if chosen.json else as_text(findings))
    return 1 if findings["problems"] else 0


def examine() -> dict[str, Any]:
    """Everything that a bug report needs, as plain values.  Imports torch, if there is one."""
    variables = settings.read(os.environ)
    c10d, torch_error = _import_c10d()
    torch = sys.modules.get("torch") if c10d else None
    version = str(torch.__version__) if torch else None
    if report.current():  # wrapped here: whether what the wrappers do can be made, `failures` says
        importlib.import_module("torchcommshim.patches").prepare()
    # In a process that is not patched the functions are torch's own, in a patched one probe looks beneath.
    traits = probe(code_of_module(c10d), version) if c10d and version else Traits(missing=(torch_error,))
    nccl = _nccl_version(torch)
    findings: dict[str, Any] = {
        "torchcommshim": {
            "version": torchcommshim.__version__,
            "folder": str(Path(torchcommshim.__file__).parent),
        },
        "python": {"version": platform.python_version(), "executable": sys.executable},
        "armed_by": [{"loader": loader, "file": _file_of(loader)} for loader in torchcommshim._armed_by],
        "sitecustomize": _sitecustomize(),
        "torch": {"version": version, "folder": next(iter(torch.__path__))} if torch else None,
        "nccl": nccl,
        "strategy": {"value": variables.strategy, "from": _origin(settings.STRATEGY, variables.strategy)},
        "agreement": {"value": variables.agreement, "from": _origin(settings.AGREEMENT, variables.agreement)},
        "check_order": {"value": variables.check_order, "from": _origin(settings.CHECK_ORDER)},
        "hang_report_s": {"value": variables.hang_report_s, "from": _origin(settings.HANG_REPORT_S)},
        "trace": {"value": variables.trace, "from": _origin(settings.TRACE)},
        "wrapped": _wrapped(c10d) if c10d else {},
        "traits": {
            name: {"value": getattr(traits, name), "found": how} for name, how in traits.found.items()
        },
        "standing_aside": list(traits.missing),
        "defects": [_defect(defect, traits, variables.strategy) for defect in defects.CATALOGUE],
        "advice": [] if traits.missing else advice(version, nccl, variables.strategy),
        "warnings": list(variables.warnings),
        "failures": report.status()["failures"],
    }
    findings["problems"] = _problems(findings)
    return findings


def _import_c10d() -> tuple[Any, str]:
    try:
        return importlib.import_module(C10D), ""
    except ModuleNotFoundError as error:
        return (
            None,
            "torch is not installed" if error.name == "torch" else f"torch cannot be imported: {error}",
        )
    except Exception as error:  # a broken torch is a finding, not the end of the examination
        return None, f"torch cannot be imported: {error!r}"


def _file_of(loader: str) -> str | None:
    """The file that armed: a sitecustomize gives its path, a `.pth` lies in a site-packages folder."""
    folders = [*site.getsitepackages(), site.getusersitepackages()]
    candidates = (Path(loader), *(Path(folder) / loader for folder in folders))
    return next((str(file) for file in candidates if file.is_absolute() and file.is_file()), None)


def _sitecustomize() -> dict[str, Any]:
    """Which `sitecustomize` this Python imports, and whether it is ours."""
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    wins = spec.origin if spec else None
    if environment.archive():
        return {"wins": wins, "ours": None, "ours_wins": False}
    ours = environment.sitecustomize_folder() / "sitecustomize.py"
    return {"wins": wins, "ours": str(ours), "ours_wins": wins is not None and Path(wins).resolve() == ours}


def _nccl_version(torch: Any) -> str | None:
    try:
        return ".".join(map(str, torch.cuda.nccl.version()))
    except Exception:  # a build without NCCL, in one of several ways
        return None


def _origin(variable: str, taken: str = "") -> str:
    """Where a setting is from, and what its value was taken for, if that is another word (1 is auto)."""
    value = os.environ.get(variable)
    other = f", taken for {taken}" if taken and value and value.strip().lower() != taken else ""
    return "default" if not value else f"{variable}={value}{other}"


def _wrapped(c10d: Any) -> dict[str, dict[str, Any]]:
    """For each function: is our wrapper in place, and which modules wrap it, outermost first."""
    return {
        name: _chain(getattr(c10d, name, None))
        for name in (*WRAPPED, *OPTIONAL)
        if name in WRAPPED or hasattr(c10d, name)
    }


def _chain(function: Any) -> dict[str, Any]:
    modules = []
    while function is not None:
        # functools.wraps copies __module__, and wrapt all attributes: a function's globals tell whose it is.
        real = type(function) is FunctionType
        name = str(function.__globals__.get("__name__")) if real else type(function).__module__
        modules.append("torchcommshim" if name == "torchcommshim.patches" else name)
        function = getattr(function, "__wrapped__", None)
    others = [name for name in modules if name.split(".")[0] not in ("torch", "torchcommshim")]
    return {"in_place": "torchcommshim" in modules, "chain": modules, "others": others}


def _defect(defect: defects.Defect, traits: Traits, strategy: str) -> dict[str, Any]:
    present = not traits.missing and defect.present(traits)
    return {
        "name": defect.name,
        "title": defect.title,
        "upstream": defect.upstream,
        "present": present,
        "remedy": _remedy(defect, traits, strategy) if present else None,
    }


def _remedy(defect: defects.Defect, traits: Traits, strategy: str) -> str:
    if strategy == "off":
        return "nothing: TORCHCOMMSHIM=off"
    prefix = "reported only; auto would do: " if strategy == "observe" else ""
    creation = defect.example
    if creation is None:
        return prefix + "TORCH_NCCL_USE_COMM_NONBLOCKING=0 is set before the world is made"
    if strategy == "strip" and creation.bound:
        return "device_id is dropped, so there is nothing to split from"
    decision = decide(creation, traits, strategy)
    return prefix + _REMEDIES.get(decision.remedy, f"the group is {defect.cure}")


def advice(torch: str | None, nccl: str | None, strategy: str) -> list[str]:
    """What is slow with these versions and is left as it is, and what the user can do.

    In 2.15 `nccl` means nccl2, of which this is not known.
    """
    if torch is None or nccl is None or strategy == "strip" or not (2, 9) <= release(torch) < (2, 15):
        return []
    return [
        "in a world with a device_id, unbatched sends and receives share a communicator with their group's "
        "collectives, and do not overlap with them (https://github.com/pytorch/pytorch/pull/156748): "
        f"{SENDS_BESIDE_AN_ALL_REDUCE}. Where that matters: TORCHCOMMSHIM=strip, or a group of their own for "
        "the sends, or batch_isend_irecv"
    ]


def _problems(findings: dict[str, Any]) -> list[str]:
    """Why the shim is not in place here; empty if it is, or if it is off on purpose."""
    if findings["strategy"]["value"] == "off":
        return []
    problems: list[str] = [f"stands aside: {reason} [TCS-inactive]" for reason in findings["standing_aside"]]
    if not findings["armed_by"]:
        problems.append(f"nothing has armed the shim in this Python: {_how_to_arm()} [TCS-not-armed]")
    elif not problems and not findings["failures"]:
        problems += [
            f"{name} is not wrapped: it is {', around '.join(entry['chain'])} [TCS-not-wrapped]"
            for name, entry in findings["wrapped"].items()
            if not entry["in_place"]
        ]
    return [*problems, *findings["warnings"], *findings["failures"]]


def _how_to_arm() -> str:
    """What helps in this Python, by what keeps the `.pth` and the folder from it."""
    archive = environment.archive()
    if archive:
        return (
            f"it lies in {archive}, and Python reads no .pth in an archive. Put `import torchcommshim; "
            "torchcommshim.install()` first in the program's __main__.py"
        )
    if sys.flags.no_site:
        return "it was started with -S, which loads nothing. Call torchcommshim.install() in the program"
    return (
        "is torchcommshim.pth in its site-packages? "
        "Or start with `torchcommshim run --`, or put `torchcommshim path` on PYTHONPATH"
    )


def as_text(findings: dict[str, Any]) -> str:
    """The findings for people."""
    torch, site = findings["torch"], findings["sitecustomize"]
    lines = [
        f"torchcommshim  {findings['torchcommshim']['version']}  {findings['torchcommshim']['folder']}",
        f"python         {findings['python']['version']}  {findings['python']['executable']}",
        f"torch          {torch['version']}  {torch['folder']}" if torch else "torch          none",
        f"NCCL           {findings['nccl'] or 'none'}",
        "armed by       " + (", ".join(map(_armed, findings["armed_by"])) or "nothing"),
        f"sitecustomize  {site['wins'] or 'none'}{' (ours)' if site['ours_wins'] else ''}",
        f"strategy       {findings['strategy']['value']}  ({findings['strategy']['from']})",
        f"agreement      {findings['agreement']['value']}  ({findings['agreement']['from']})",
        f"order check    {_on(findings['check_order'])}  ({findings['check_order']['from']})",
        f"hang report    {_after(findings['hang_report_s'])}  ({findings['hang_report_s']['from']})",
        f"trace          {findings['trace']['value'] or 'off'}  ({findings['trace']['from']})",
        "",
        "Wrapped functions, outermost first",
    ]
    for name, entry in findings["wrapped"].items():
        others = f"  also by {', '.join(entry['others'])}" if entry["others"] else ""
        lines.append(f"  {'yes' if entry['in_place'] else 'NO ':3}  {name:28}{others}")
    lines += ["", "Traits of this torch"]
    for name, entry in findings["traits"].items():
        lines.append(f"  {'yes' if entry['value'] else 'no':3}  {name:24}  {entry['found']}")
    lines += ["", "Known defects of this torch, and what is done about them"]
    for entry in findings["defects"]:
        if entry["present"]:
            lines += [
                f"  {entry['name']}: {entry['title']}",
                f"      {entry['upstream']}",
                f"      {entry['remedy']}",
            ]
    if findings["advice"]:
        lines += ["", "Slow on this torch", *(f"  {line}" for line in findings["advice"])]
    problems = findings["problems"]
    lines += ["", "Problems" if problems else "No problems found."] + [f"  {problem}" for problem in problems]
    return "\n".join(lines)


def _on(entry: dict[str, Any]) -> str:
    return "on" if entry["value"] else "off"


def _after(entry: dict[str, Any]) -> str:
    return f"after {entry['value']:g} s" if entry["value"] else "off"


def _armed(entry: dict[str, Any]) -> str:
    return str(entry["file"] or entry["loader"])
