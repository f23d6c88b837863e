# SPDX-License-Identifier: Apache-2.0
"""The benchmarks, as far as noise cannot touch it: what they count, and that they run."""

from __future__ import annotations

import json
import math
import sys
from importlib.util import find_spec

import pytest
from conftest import ROOT

sys.path.append(str(ROOT / "benchmarks"))
import bring_up
import hang_report
import page
import point_to_point
import ranks
import sampling
import scale
import waits
from environments import printed_by

from torchcommshim.repair import splits
from torchcommshim.repair.traits import code_of_module, probe

needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")


# -- counts ------------------------------------------------------------------------------------------


@pytest.mark.once
@pytest.mark.parametrize("release", scale.RELEASES)
@pytest.mark.parametrize("layout", [(1, 4, 2), (2, 2, 4), (2, 4, 4)], ids="{0[0]}-{0[1]}-{0[2]}".format)
def test_counts_are_the_models(layout, release):
    """On every rank, the splits that the benchmark counts are those of the model that plays all ranks."""
    groups = list(scale.creations(scale.Layout(*layout)))
    size = math.prod(layout)
    ways = [way for way in scale.WAYS if release != "2.3, 2.4" or way != "device_id"]  # which hangs
    played, counted = {}, {}
    for way in ways:
        program = splits.Program(splits.World(size, bound=way != "lazy"))
        made = [program.new_group(ranks, backend) for ranks, backend in groups]
        for group in (splits.WORLD, *made):
            program.all_reduce(group)
        strategy = None if way in ("lazy", "device_id") else way
        rounds = splits.run(program, scale.RELEASES[release], strategy).rounds
        calls = [[each[rank].colour is None for each in rounds] for rank in range(size)]
        played[way] = [(len(mine) - sum(mine), sum(mine)) for mine in calls]
        counts = [scale.counted(groups, size, scale.RELEASES[release], way, rank) for rank in range(size)]
        counted[way] = [(each.splits, each.nocolor) for each in counts]

    assert counted == played


@needs_torch
def test_order_is_that_of_the_scenario(monkeypatch):
    """The benchmark's groups for TP 1 and PP 4 are those of the scenario `megatron`, in its order."""
    from torchcommshim.commands.verify.catalogue import FOLDER

    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.syspath_prepend(FOLDER)
    import megatron

    sizes = (4, 8, 64)
    expected = [list(megatron.creations(size)) for size in sizes]
    assert expected == [list(scale.creations(scale.Layout(1, 4, size // 4))) for size in sizes]


LAYOUTS = (scale.Layout(1, 4, 2), scale.Layout(4, 4, 8))


@pytest.fixture(scope="module")
def played():
    """What torch asked for on rank 0 of each of `LAYOUTS`, by way."""
    return [printed_by("scale.py", layout.tensor, layout.pipeline, layout.data)["ways"] for layout in LAYOUTS]


@needs_torch
def test_store_operations(played):
    """A world costs a rank eight store operations, for any number of ranks and groups."""
    expected = {"device_id": 0, "auto": scale.OWN, "strip": scale.OWN}

    assert [{way: found["store"] for way, found in ways.items()} for ways in played] == [expected, expected]


@needs_torch
def test_torch_asks_for_what_is_counted(played):
    """torch's own creation code asks for as many splits, without the shim and with it, as are counted."""
    import torch
    import torch.distributed.distributed_c10d as c10d

    traits = probe(code_of_module(c10d), torch.__version__)
    asked = [{way: found["nocolor"] for way, found in ways.items()} for ways in played]
    counted = [
        {way: scale.counted(list(scale.creations(layout)), layout.ranks, traits, way).nocolor for way in ways}
        for layout, ways in zip(LAYOUTS, played)
    ]

    assert asked == counted


@needs_torch
def test_creations_are_measured(tmp_path):
    """A creation is measured without the shim and with it, here in a world that has the hang report."""
    found = printed_by("creation.py", "watched", 40, tmp_path)

    assert all(row["added_us"]["count"] for row in found["conditions"].values())


# -- runs of several ranks, on simulated NCCL ----------------------------------------------------------


def outcome(program, size, condition):
    """Run `program` once: the failures, and what it says."""
    series = ranks.Series("test", program, size, {"gpus": []}, seconds=60)
    series.run("way", condition)
    result = series.result(base="way", of="any")
    return result["failures"], result["ways"]["way"]


@needs_torch
def test_bring_up_runs():
    """The bring-up of a job makes and uses all groups, and says how long each stage took."""
    failures, found = outcome(bring_up.bring_up, 4, ranks.Condition("auto"))

    assert failures == []
    assert [name for name in found if name != "to_base"] == ["init", "groups", "use", "total", "memory_mib"]


@needs_torch
def test_point_to_point_runs(monkeypatch):
    """The steps of sends beside a collective end, and say how long each part took."""
    monkeypatch.setattr(point_to_point, "GRADIENTS", 1 << 10)
    monkeypatch.setattr(point_to_point, "ACTIVATIONS", 1 << 10)
    failures, found = outcome(point_to_point.steps, 3, ranks.Condition("strip"))

    assert failures == []
    assert [name for name in found if name != "to_base"] == ["step", "sends", "all_reduce"]


@needs_torch
def test_rank_that_fails():
    """A run of which a rank fails says which, and its last words; the others are ended."""
    failures, _ = outcome(_fails_on_rank_1, 2, ranks.Condition("off"))

    assert failures == ["way: rank 1: ValueError: no luck"]


def _fails_on_rank_1(meeting, bound):
    if meeting.rank == 1:
        raise ValueError("no luck")
    return {"number": 1.0}


@pytest.mark.once
@pytest.mark.skipif(sys.platform != "linux", reason="the hang report works on Linux only")
def test_hang_report_is_measured(monkeypatch):
    """A creation costs something, and a job with a rank that is late has its report."""
    monkeypatch.setattr(hang_report, "CREATIONS", 10)
    monkeypatch.setattr(hang_report, "LIMIT_S", 1.0)
    measured = [hang_report.creation_us(8), *hang_report.report_s(4)]

    assert [value > 0 for value in measured] == [True] * 3


@pytest.mark.once
@pytest.mark.skipif(sys.platform != "linux", reason="the hang report works on Linux only")
def test_waits_are_measured():
    """A look costs something, more where somebody asks, and a question brings the picture of all ranks."""
    looks, took = waits.look_us(8, 20), waits.where_s(4)

    assert 0 < looks["moves"] < looks["waits"] < looks["asked"]
    assert 0 < took["answers"] <= took["picture"]


# -- the page ------------------------------------------------------------------------------------------


@pytest.mark.once
def test_page_is_made_of_the_results():
    """docs/performance.md is what the renderer makes of docs/performance.json: nothing is written by hand."""
    results = json.loads((ROOT / "docs" / "performance.json").read_text())

    assert (ROOT / "docs" / "performance.md").read_text() == page.text(results)


@pytest.mark.once
def test_page_says_what_was_not_run():
    """A part without a result is named as not run."""
    assert page.text({}).count("Not run.") == page.text({}).count("## ")


@pytest.mark.once
def test_spread():
    """Quartiles of few values lie among them; failed rounds do not count."""
    assert sampling.spread([4.0, 1.0, 2.0, math.nan]) == {
        "median": 2.0,
        "q1": 1.5,
        "q3": 3.0,
        "min": 1.0,
        "max": 4.0,
        "count": 3,
    }


@pytest.mark.once
def test_ratio():
    """A ratio is one of medians, within an interval from resampled rounds; failed rounds do not count."""
    found = sampling.ratio([2.0, 4.0, 6.0, math.nan], [1.0, 2.0, 3.0, 1.0])

    assert (found["ratio"], found["count"]) == (2.0, 3)
    assert found["low"] <= 2.0 <= found["high"]


@pytest.mark.once
def test_alternation():
    """Conditions are taken by turns, every other round backwards, and at least one round is made."""
    taken = []
    conditions = {name: lambda name=name: taken.append(name) or len(taken) for name in "ab"}
    values = sampling.alternate(conditions, rounds=2)
    sampling.alternate(conditions, rounds=5, seconds=0)

    assert "".join(taken) == "abba" + "ab"
    assert values == {"a": [1, 4], "b": [2, 3]}
