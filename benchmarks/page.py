# SPDX-License-Identifier: Apache-2.0
"""docs/performance.md and its plot, from the results: a page says nothing that is not in them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

Results = Mapping[str, Mapping[str, Any]]

BRING_UP_RANKS, BRING_UP_GROUPS = 8, 82  # Megatron's creations on as many ranks, which gpu-bring-up makes
CREATION_GOAL_PERCENT = 1.0  # of what a creation takes on real NCCL

HEAD = """\
# What it costs

Written by `python benchmarks/run.py` from the numbers in `performance.json`. What is compared was measured
side by side in one run, by turns, since times differ from machine to machine and from hour to hour. A
difference is a median with its quartiles (a to b). A ratio is one of medians, with the interval (a to b)
that holds it in 95 % of resamplings of the rounds. Where a part was not run, the page says so.
"""

START = """\
Processor time of `site.main()` in a Python that runs `-c pass`, beyond that of a bare virtual environment
({bare} ms). A launcher's own start is not counted.

{table}
torchcommshim adds {ratio} times what the empty module adds.
"""

IMPORT = """\
A whole `python -c "import torch"`, in two virtual environments that share one torch.

{table}
Added processor time, round by round: {added}. Within one import with the shim, {share} of the time goes
into modules that are not imported without it; that share is measured in one process, so load and drift matter
less.
"""

CREATION = """\
Processor time of one `new_group` in a process that poses as one rank of 8: {groups:,} groups a world, made
without the shim and with each strategy by turns. torch's own part grows with the groups that exist; the
shim's should not, so it is given over the first and the last tenth of them too.

| world | what it is |
| --- | --- |
| unbound | no device_id, torch's fake backend: most jobs, and nothing to repair |
| bound | a device_id, over a backend that can be split |
| repaired | the same, and each group has another backend, which torch up to 2.14 splits for by mistake |
| stripped | made with a device_id that `strip` has dropped |
| watched | bound, with the hang report, which every real world has unless it is turned off |
| traced | bound, with the trace |

{table}
Beside a real creation this is little: on the GPU machine below, making one of Megatron's groups and using it
once takes {real} ms of wall-clock time in the fastest way that was measured. The goal is a share of that.
"""

WAITS = """\
Each rank has a thread that looks every {period:g} s where the rank is (docs/hangs.md). Processor time of one
look in a process that poses as a rank, whose main thread waits in a collective beneath 20 frames; a median.

{looks}
From the question `torchcommshim where` to the picture, of a job whose ranks wait in groups of 8: one real
watcher, which is the hub, and one process that stands in for those of all other ranks.

{answers}"""

BRING_UP = """\
Megatron's groups (82 creations on 8 ranks, 57 on 4), from `init_process_group` until each has been used once:
the slowest rank's time, and the GPU memory that the communicators took. The ranks share a GPU where there are
fewer GPUs than ranks, and then talk over sockets. `without device_id` and `without the shim` have it off.

{table}"""

TRAINING = """\
The pipeline example, {ranks} stages in as many processes, {iterations} iterations; the median iteration of
each run.

{table}
Ratio {ratio}. {same} functions of `torch.distributed` that communicate are the same objects with and without
the shim; the benchmark fails if one is not.
"""

POINT_TO_POINT = """\
A step starts an all-reduce of {gradients} MiB, passes {micro_batches} messages of {activations} KiB down the
line of ranks with unbatched sends and receives, and waits. On torch 2.9 to 2.14 a group that is bound to a
device has one communicator for both (https://github.com/pytorch/pytorch/pull/156748), so a send waits for the
collective before it.

{table}"""

SCALE = """\
What one rank does to make and connect Megatron's groups, counted with the shim's own policy; a test checks
the counts against the model `torchcommshim.repair.splits`. A split is a call of every rank, for which NCCL
gathers all ranks' colours over the world's bootstrap ring: `ranks - 1` messages of each rank (older releases
of NCCL gather twice). A group that is connected without a split takes one operation in the store on each of
its ranks; the shim itself takes {own} a world (to agree, for the hang report, to keep worlds apart), none a
creation. What connecting a group costs beyond that is the same in all ways.

{layouts}
At {most:,} ranks:

{counts}
![Messages and store operations of one rank, by number of ranks](performance.png)

A process that poses as rank 0 of so many ranks: torch's own creation code, over a backend that connects to
nobody. The store operations are the shim's.

{plays}"""

NOT_RUN = "Not run.\n"
ENOUGH = 5  # rounds, to tell anything from noise


def text(results: Results) -> str:
    """The page, in Markdown."""
    sections = (
        ("Start of Python", "start", _start),
        ("Importing torch", "import", _import),
        ("A creation", "creation", partial(_creation, real_us=_real_creation_us(results))),
        ("Where every rank is", "waits", _waits),
        ("Start of a job on real NCCL", "gpu-bring-up", _bring_up),
        ("A training step", "training", _training),
        ("A training step on GPUs", "gpu-training", _training),
        ("Sends and receives beside a collective", "gpu-p2p", _point_to_point),
        ("Scale, on paper", "scale", _scale),
    )
    parts = [HEAD, _summary(results)]
    for title, name, render in sections:
        parts.append(f"## {title}\n")
        found = _of(results, name)
        parts += [f"{_about(result)}\n\n{render(result)}" for result in found] or [NOT_RUN]
    return "\n".join(parts)


def _of(results: Results, name: str) -> list[Mapping[str, Any]]:
    """The results of one part, of each torch that it was run on."""
    return [result for key, result in results.items() if key.partition(",")[0] == name]


def _about(result: Mapping[str, Any]) -> str:
    machine = result.get("machine", {})
    gpus = machine.get("gpus") or []
    words = [
        f"torch {result['torch']}" if result.get("torch") else "",
        f"NCCL {machine['nccl']}" if gpus else "",
        f"{result['ranks']} ranks on {len(gpus)} {gpus[0]}" if gpus else f"{result['cores']} CPU cores",
        f"Python {result['python']}, torchcommshim {result['torchcommshim']}, {result['date']}",
    ]
    return ", ".join(filter(None, words)) + "."


# -- numbers in words -------------------------------------------------------------------------------


def _number(value: float) -> str:
    """Three digits, without an exponent."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if value else "0"


def _spread(of: Mapping[str, float], unit: str = "") -> str:
    if not of["count"]:
        return "no run succeeded"
    quartiles = f" ({_number(of['q1'])} to {_number(of['q3'])})" if of["count"] > 1 else ""
    return f"{_number(of['median'])}{unit}{quartiles}"


def _ratio(of: Mapping[str, float]) -> str:
    if not of["count"]:
        return "-"
    interval = f" ({of['low']:.4g} to {of['high']:.4g})" if of["count"] > 1 else ""
    return f"{of['ratio']:.4g}{interval}"


def _table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    lines = [f"| {' | '.join(head)} |"]
    lines.append("| --- " * (lines[0].count("|") - 1) + "|")
    lines += [f"| {' | '.join(map(str, row))} |" for row in rows]
    return "\n".join(lines) + "\n"


# -- the parts -----------------------------------------------------------------------------------------


def _summary(results: Results) -> str:
    rows: list[tuple[str, str, str, str]] = []

    def row(claim: str, goal: str, measured: str, met: bool, *, missed: bool) -> None:
        rows.append((claim, goal, measured, "yes" if met else "**no**" if missed else "undecided"))

    for result in _of(results, "start"):
        least, peers = result["shim_to_empty"], result["peer_to_shim"]
        goals = result["goals"]
        claim = "start of Python: times what an empty module adds"
        goal = goals["empty"]
        row(claim, f"at most {goal}", _ratio(least), least["ratio"] <= goal, missed=least["low"] > goal)
        name = min(peers, key=lambda peer: peers[peer]["ratio"])
        claim = f"start of Python: times cheaper than the cheapest peer ({name})"
        goal, of = goals["peers"], peers[name]
        row(claim, f"at least {goal}", _ratio(of), of["ratio"] >= goal, missed=of["high"] < goal)
    for result in _of(results, "import"):
        on = f"`import torch` {result['torch']}: share of the shim's own modules in it, %"
        share, goal = result["share_percent"], 100 * result["goal"] - 100
        row(on, f"at most {goal:.2g}", _spread(share), share["median"] <= goal, missed=share["q1"] > goal)
    for result in _of(results, "creation"):
        real_us = _real_creation_us(results)
        for world, found in result["worlds"].items() if real_us else ():
            worst = max(found["conditions"], key=lambda name: found["conditions"][name]["added_us"]["median"])
            added = found["conditions"][worst]["added_us"]
            share = {key: added[key] if key == "count" else 100 * added[key] / real_us for key in added}
            claim = f"a creation on torch {result['torch']}, {world} world, {worst}: share of a real one, %"
            met = share["median"] <= CREATION_GOAL_PERCENT
            goal = f"at most {CREATION_GOAL_PERCENT:g}"
            row(claim, goal, _spread(share), met, missed=share["q1"] > CREATION_GOAL_PERCENT)
    for name in ("training", "gpu-training"):
        for result in _of(results, name):
            of = result["to_without"]
            claim = f"{name}, torch {result['torch']}: the time of a step, times"
            if of["count"]:
                met = of["count"] >= ENOUGH and of["low"] <= 1 <= of["high"]
                row(claim, "1 within the interval", _ratio(of), met, missed=not met and of["count"] >= ENOUGH)
    return _table(("claim", "goal", "measured", "met"), rows) if rows else ""


def _real_creation_us(results: Results) -> float | None:
    """What one of Megatron's groups takes on real NCCL with its first use, in the fastest way measured."""
    found = [result for result in _of(results, "gpu-bring-up") if result["ranks"] == BRING_UP_RANKS]
    ways = [way for result in found for way in result["ways"].values()]
    taken = [way["groups"]["median"] + way["use"]["median"] for way in ways if way["use"]["count"]]
    return min(taken) / BRING_UP_GROUPS * 1e6 if taken else None


def _waits(result: Mapping[str, Any]) -> str:
    period_s = result["period_s"]
    looks = [
        (
            f"{int(groups):,}",
            *(_number(of[name]) for name in ("moves", "waits", "asked")),
            f"{of['waits'] / period_s / 1e4:.2g}",
        )
        for groups, of in result["looks_us"].items()
    ]
    head = (
        "groups of the rank",
        "µs, if it moves",
        "µs, if it waits",
        "µs, if somebody asks",
        "% of a core, waiting",
    )
    answers = [
        (f"{int(ranks):,}", *(f"{of[name]:.2f}" for name in ("answers", "picture")))
        for ranks, of in result["where_s"].items()
    ]
    return WAITS.format(
        period=period_s,
        looks=_table(head, looks),
        answers=_table(("ranks", "s, to the last answer", "s, to the picture"), answers),
    )


def _start(result: Mapping[str, Any]) -> str:
    names = {
        "empty": "a `.pth` that imports one empty module",
        "shim": "torchcommshim installed",
        "folder": "torchcommshim's folder on PYTHONPATH",
        "wrapt": "a `.pth` that imports wrapt",
    }
    peers = result["peer_to_shim"]
    rows = [
        (
            names.get(name, f"`{name}`"),
            _spread(result["added_ms"][name]),
            result["modules"][name],
            _ratio(peers[name]) if name in peers else "",
        )
        for name in dict.fromkeys((*names, *peers))
    ]
    table = _table(("environment", "added ms", "added modules", "times torchcommshim's"), rows)
    return START.format(bare=_spread(result["bare_ms"]), table=table, ratio=_ratio(result["shim_to_empty"]))


def _import(result: Mapping[str, Any]) -> str:
    rows = []
    for title, key in (("processor time", "processor"), ("wall-clock time", "wall")):
        of = result[f"{key}_s"]
        rows.append((title, _spread(of["without"], " s"), _spread(of["with"], " s"), _ratio(result[key])))
    added = _spread(result["added_ms"], " ms")
    share = _spread(result["share_percent"], " %")
    return IMPORT.format(table=_table(("", "without", "with", "ratio"), rows), added=added, share=share)


def _creation(result: Mapping[str, Any], real_us: float | None) -> str:
    real = _number(real_us / 1000) if real_us else "(not measured)"
    rows = [
        (
            world,
            name,
            _spread(found["without_us"]),
            _spread(row["added_us"]),
            _number(row["first_tenth_us"]),
            _number(row["last_tenth_us"]),
        )
        for world, found in result["worlds"].items()
        for name, row in found["conditions"].items()
    ]
    head = ("world", "strategy", "torch alone µs", "added µs", "first tenth", "last tenth")
    return CREATION.format(groups=result["groups"], table=_table(head, rows), real=real)


def _ways(result: Mapping[str, Any], columns: Mapping[str, str]) -> str:
    rows = [
        (
            way,
            *(_spread(found[name]) if name in found else "-" for name in columns),
            _ratio(found["to_base"]),
            found["to_base"]["count"],
        )
        for way, found in result["ways"].items()
    ]
    ratio = f"{result['of']}, times `{result['base']}`"
    return _table(("", *columns.values(), ratio, "runs"), rows) + _failures(result)


def _failures(result: Mapping[str, Any]) -> str:
    lines = [f"- {failure}" for failure in result["failures"]]
    return "\n".join(["", "Runs that failed:", "", *lines, ""]) if lines else ""


def _bring_up(result: Mapping[str, Any]) -> str:
    times = {"init": "init s", "groups": "groups s", "use": "first use s", "total": "total s"}
    return BRING_UP.format(table=_ways(result, {**times, "memory_mib": "MiB a rank"}))


def _training(result: Mapping[str, Any]) -> str:
    rows = [(name, _spread(of), of["count"]) for name, of in result["step_ms"].items()]
    return TRAINING.format(
        ranks=result["ranks"],
        iterations=result["iterations"],
        table=_table(("", "ms a step", "runs"), rows) + _failures(result),
        ratio=_ratio(result["to_without"]),
        same=len(result["collectives"]),
    )


def _point_to_point(result: Mapping[str, Any]) -> str:
    columns = {"step": "step ms", "sends": "sends alone ms", "all_reduce": "all-reduce alone ms"}
    return POINT_TO_POINT.format(
        gradients=result["gradients"] >> 20,
        micro_batches=result["micro_batches"],
        activations=result["activations"] >> 10,
        table=_ways(result, columns),
    )


def _scale(result: Mapping[str, Any]) -> str:
    counted = result["counted"]
    most = max(row["ranks"] for row in counted)
    layouts = {row["ranks"]: (f"{row['ranks']:,}", row["layout"], f"{row['creations']:,}") for row in counted}
    counts = [
        (
            row["torch"],
            WAYS[row["way"]] + " (hangs)" * row["hangs"],
            f"{row['splits'] + row['nocolor']:,}",
            f"{row['messages']:,}",
            row["store"],
        )
        for row in counted
        if row["ranks"] == most
    ]
    plays = [
        (
            f"{play['ranks']:,}",
            WAYS[way],
            *(f"{found[name]:,}" for name in ("creations", "nocolor", "store")),
            _number(found["seconds"]),
        )
        for play in result["played"]
        for way, found in play["ways"].items()
    ]
    played = ("ranks", "", "creations", "splits for groups of others", "store operations", "processor s")
    return SCALE.format(
        own=result["own"],
        most=most,
        layouts=_table(("ranks", "layout", "creations a rank"), layouts.values()),
        counts=_table(("torch", "", "splits a rank", "messages a rank", "store operations a rank"), counts),
        plays=_table(played, plays),
    )


WAYS = {
    "lazy": "no device_id",
    "device_id": "device_id, without the shim",
    "auto": "`auto`",
    "split": "`split`",
    "strip": "`strip`",
}


def plot(results: Results, path: Path) -> None:
    """Draw the messages of a rank by the number of ranks."""
    found = _of(results, "scale")
    if not found:
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    counted = found[-1]["counted"]
    releases = list(dict.fromkeys(row["torch"] for row in counted))
    figure, all_axes = pyplot.subplots(
        1, len(releases), figsize=(11, 3.8), sharey=True, layout="constrained", squeeze=False
    )
    for axes, release in zip(all_axes[0], releases):
        # Lines that coincide: each shows within the one before.
        for way, width in zip(WAYS, (9, 7, 5, 3.2, 1.4)):
            rows = [row for row in counted if (row["torch"], row["way"]) == (release, way)]
            label = WAYS[way].replace("`", "") + (" (hangs)" if rows[0]["hangs"] else "")
            axes.plot(
                [row["ranks"] for row in rows],
                [row["messages"] + row["store"] for row in rows],
                linewidth=width,
                linestyle=":" if rows[0]["hangs"] else "-",
                label=label,
                solid_capstyle="round",
            )
        axes.set(xscale="log", yscale="log", xlabel="ranks", title=f"torch {release}")
        axes.set_xscale("log", base=2)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    all_axes[0][0].set_ylabel("messages and store operations\nof one rank")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
