# SPDX-License-Identifier: Apache-2.0
"""Simulated NCCL fails where the real one was seen to fail: with the same hangs and the same wrong sums.

The rows M0 to M15 were measured on real NCCL with 4 ranks, the world bound to a device.  What stands here
of each is the outcome on this torch, without the shim.
"""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from verified import LATE, run_program, sums, verdict, waits

pytestmark = pytest.mark.timeout(900)  # the first test that asks waits for all scenarios


class TestMeasuredRows:
    def test_m0_group_of_one_then_barrier(self):
        """new_group([0]), barrier: late members hang, the others waiting in the split."""
        found = verdict("reported_program")

        assert found["verdict"] == ("hang" if LATE else "ok")
        assert waits(found) == (
            {0: "wait", 1: "perform_nocolor_split", 2: "perform_nocolor_split", 3: "perform_nocolor_split"}
            if LATE
            else {}
        )

    def test_m1_group_then_world_collective(self):
        """new_group([0, 1]), world all-reduce: late members hang, 2 and 3 in the split, 0 and 1 after it."""
        found = verdict("one_group")

        assert found["verdict"] == ("hang" if LATE else "ok")
        assert waits(found) == (
            {0: "wait", 1: "wait", 2: "perform_nocolor_split", 3: "perform_nocolor_split"} if LATE else {}
        )

    def test_m2_m14_m15_end_well(self, tmp_path):
        """Groups that divide the world, each rank's own group, gloo groups whose splits cancel out: ok."""
        program = """
first, second = dist.new_group([0, 2]), dist.new_group([1, 3])
check_sum([0, 2], first)
check_sum([1, 3], second)

own = [0, 1] if rank < 2 else [2, 3]
check_sum(own, dist.new_group(own))
"""
        if not LATE:
            program += """
dist.new_group([0, 1], backend="gloo")
dist.new_group([2, 3], backend="gloo")
check_sum([0, 2], dist.new_group([0, 2]))
"""
        assert run_program(tmp_path, program + "finish()").lines() == []

    def test_m3_overlapping_groups(self):
        """new_group([0, 1]), new_group([0, 2]): late members get communicators of one rank."""
        found = verdict("overlapping_groups")

        assert found["verdict"] == ("wrong" if LATE else "ok")
        assert sums(found) == ([([0, 1], 0, 1), ([0, 1], 1, 2)] if LATE else [])

    def test_m4_gloo_group(self):
        """A gloo group: ranks 2 and 3 wait in the split, 0 and 1 in the world's all-reduce."""
        found = verdict("gloo_subgroup")

        assert found["verdict"] == "hang"
        assert waits(found) == {0: "wait", 1: "wait", 2: "perform_nocolor_split", 3: "perform_nocolor_split"}

    def test_m5_gloo_groups_around_an_nccl_group(self):
        """A hang with late members; else rank 0 gets 1 and rank 2 gets 3, where 4 is right."""
        found = verdict("gloo_among_nccl")

        assert found["verdict"] == ("hang" if LATE else "wrong")
        assert sums(found) == ([] if LATE else [([0, 2], 0, 1), ([0, 2], 2, 3)])

    def test_m6_local_synchronization(self):
        """Members hang: in the first collective if they split late, else while the group is made."""
        found = verdict("local_synchronization")

        assert found["verdict"] == "hang"
        assert {rank: waits(found)[rank] for rank in (0, 1)} == dict.fromkeys(
            (0, 1), "allreduce" if LATE else "eager_connect_single_device"
        )

    def test_m10_direct_helper(self):
        """Ranks that call the helper directly hang in the first collective: they were not made to connect."""
        found = verdict("direct_helper")

        assert found["verdict"] == "hang"
        assert {rank: waits(found)[rank] for rank in (0, 1)} == dict.fromkeys((0, 1), "allreduce")

    def test_m11_local_names(self):
        """A local-synchronization group after an uneven one hangs where its name depends on a counter."""
        assert verdict("local_after_uneven")["verdict"] == ("ok" if LATE else "hang")

    @pytest.mark.skipif(LATE, reason="members of this release's subgroups are not bound to the device")
    def test_m13_group_without_backend_for_the_device(self, tmp_path):
        """backend="cpu:gloo": members raise, the other ranks wait in the split."""
        found = run_program(tmp_path, 'dist.new_group([0, 1], backend="cpu:gloo")')

        assert found.verdict == "error"
        assert {
            "No backend type associated with device type cuda" in each.message for each in found.failures
        } == {True}
        assert {wait.rank for wait in found.waits if "perform_nocolor_split" in wait.inside} == {2, 3}


class TestLikeRealNCCL:
    def test_collectives(self, tmp_path):
        """Sum, maximum, broadcast, gathering and batches of sends give what NCCL gives."""
        program = """
tensor = torch.tensor([rank])
dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
assert tensor.tolist() == [3]

tensor = torch.tensor([rank])
dist.broadcast(tensor, src=2)
assert tensor.tolist() == [2]

gathered = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
dist.all_gather(gathered, torch.tensor([rank]))
assert [each.item() for each in gathered] == [0, 1, 2, 3]

if rank == 0:
    dist.send(torch.tensor([7]), dst=1)
if rank == 1:
    dist.recv(tensor, src=0)
    assert tensor.tolist() == [7]
finish()
"""
        assert run_program(tmp_path, program).lines() == []

    def test_split_holds_the_global_lock(self, tmp_path):
        """While a rank waits in a split that others join late, none of its Python threads runs."""
        program = """
import threading, time
ticks = 0
def tick():
    global ticks
    while True:
        ticks += 1
        time.sleep(0.01)
threading.Thread(target=tick, daemon=True).start()
dist.barrier()
before = ticks
time.sleep(1)  # the members are this late
free, before = ticks - before, ticks
group = dist.new_group([0, 1])
if rank > 1:
    assert ticks - before < free / 4, (ticks - before, free)
check_sum([0, 1], group)
finish()
""".replace("time.sleep(1)", "time.sleep(1 if rank > 1 else 2)")

        assert run_program(tmp_path, program).lines() == []

    @pytest.mark.skipif(LATE, reason="this release has no split_group")
    @pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
    def test_split_group(self, tmp_path, backend):
        """Parts, no part, a parent that is not the world; a part has the backends that C++ gives it."""
        program = """
half = dist.split_group(None, [[0, 1], [2, 3]], group_desc="half")
own = [0, 1] if rank < 2 else [2, 3]
check_sum(own, half)
assert (dist.get_process_group_ranks(half), half.group_desc) == (own, "half")

first = dist.split_group(half, [[0]])
assert (first is None or first is dist.GroupMember.NON_GROUP_MEMBER) == (rank % 2 == 1)
check_sum([own[0]], first if rank % 2 == 0 else None)

gloo = "gloo" in dist.get_backend_config()
backends = [half._get_backend(torch.device(each)).name() for each in ("cpu", "cuda")]
assert backends == ["gloo" if gloo else "nccl", "nccl"], backends
finish()
"""
        found = run_program(tmp_path, program, backend=backend)

        assert found.lines() == []

    @pytest.mark.skipif(LATE, reason="this release has no split_group")
    def test_split_group_takes_every_rank_of_the_parent(self, tmp_path):
        """A rank in no part that does not come is waited for."""
        program = """
if rank != 3:
    dist.split_group(None, [[0, 1, 2]])
"""
        found = run_program(tmp_path, program, deadline=5)

        assert (found.verdict, {wait.rank for wait in found.waits if wait.line}) == ("hang", {0, 1, 2})

    @pytest.mark.skipif(LATE, reason="this release has no split_group")
    def test_functional_collectives(self, tmp_path):
        """What torch's C++ asks a group to do for DTensor and FSDP goes over simulated NCCL."""
        program = """
import torch.distributed._functional_collectives as functional
group = dist.split_group(None, [[0, 1], [2, 3]])
own = [0, 1] if rank < 2 else [2, 3]
mine = torch.tensor([rank, rank + 1])
assert functional.all_reduce(mine, "sum", group).tolist() == [sum(own), sum(own) + 2]
assert functional.all_gather_tensor(mine, 0, group).tolist() == [own[0], own[0] + 1, own[1], own[1] + 1]
assert functional.reduce_scatter_tensor(mine, "sum", 0, group).tolist() == [sum(own) + 2 * (rank % 2)]
output = torch.zeros(4, dtype=torch.int64)
dist.all_gather_into_tensor(output, mine, group=group)
assert output.tolist() == [own[0], own[0] + 1, own[1], own[1] + 1]
finish()
"""
        assert run_program(tmp_path, program).lines() == []

    def test_point_to_point_of_a_split_group(self, tmp_path):
        """A pair of a group that was split connects without a split, as seen on real NCCL."""
        program = """
group = dist.new_group([0, 1, 2, 3])
check_sum(range(4), group)
if rank == 0:
    dist.send(torch.tensor([7]), dst=1, group=group)
if rank == 1:
    dist.recv(torch.tensor([0]), src=0, group=group)
finish()
"""
        assert run_program(tmp_path, program).lines() == []
