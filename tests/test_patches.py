# SPDX-License-Identifier: Apache-2.0
"""The wrappers in torch's own creation code, one rank of a world at a time (see `recorder`)."""

from __future__ import annotations

import copy
import functools
import inspect
import os
import pickle
import sys
import threading
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
np = pytest.importorskip("numpy", reason="needs numpy")
import torch.distributed as dist  # noqa: E402
from recorder import DEVICE, Recorder, events, on_create, world  # noqa: E402

import torchcommshim  # noqa: E402
from torchcommshim import patches  # noqa: E402
from torchcommshim.repair import shim as acting  # noqa: E402
from torchcommshim.tell import report  # noqa: E402

c10d = sys.modules["torch.distributed.distributed_c10d"]
LATE = torch.__version__.startswith("2.4.")  # members split late, non-members at once

pytestmark = pytest.mark.filterwarnings("default")  # torch's own warnings differ between releases


def is_ours(function):
    """It is a wrapper of ours, not beneath another one."""
    return function.__globals__["__name__"] == patches.__name__


@pytest.fixture(autouse=True)
def machine_with_gpus(monkeypatch):
    """Let torch accept cuda:0 as a device_id on a machine without GPUs."""
    if hasattr(torch, "accelerator"):
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_, **__: torch.device("cuda"))
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: 8)


@pytest.fixture
def bare():
    """This process without the shim, whatever has armed it."""
    torchcommshim.uninstall()
    yield
    torchcommshim.uninstall()


@pytest.fixture
def shim(bare, monkeypatch):
    """A function that installs the shim with a strategy; ranks do not compare, for there is only one."""
    monkeypatch.setenv("TORCHCOMMSHIM_AGREEMENT", "off")

    def install(strategy="auto"):
        monkeypatch.setenv("TORCHCOMMSHIM", strategy)
        torchcommshim.install()
        return report.current()

    return install


@pytest.fixture
def helper_calls(bare, monkeypatch):
    """The arguments, by name, that torch's own helper is called with."""
    calls = []
    original = c10d._new_process_group_helper
    signature = inspect.signature(original)

    @functools.wraps(original)
    def spy(*args, **kwargs):
        calls.append(signature.bind(*args, **kwargs).arguments)
        return original(*args, **kwargs)

    monkeypatch.setattr(c10d, "_new_process_group_helper", spy)
    return calls


# What is made independent, and what is left alone.


def test_without_the_shim(bare):
    """torch itself splits on a rank outside the group, whatever the group's backend."""
    with world(rank=3):
        dist.new_group([0, 1])
        dist.new_group([0, 1], backend="gloo")

        assert [("nocolor", DEVICE)] * 2 == events


def test_outsiders_do_not_split_for_another_backend(shim):
    """A rank outside a gloo group takes no part in a split."""
    shim()
    with world(rank=3):
        dist.new_group([0, 1], backend="gloo")

        assert [] == events


def test_group_of_the_worlds_backend(shim):
    """A group of the world's backend is made independent where members split late, else it splits."""
    shim()
    with world(rank=3):
        dist.new_group([0, 1])

        assert ([] if LATE else [("nocolor", DEVICE)]) == events


def test_members_get_no_split_source(shim):
    """A member of an independent group is not handed the world to split from."""
    shim()
    sources = []
    original = c10d._get_split_source
    c10d._get_split_source = lambda *args: sources.append(original(*args)) or sources[-1]
    try:
        with world(rank=0):
            dist.new_group([0, 1], backend="other")
    finally:
        c10d._get_split_source = original

    assert [None] == sources


def test_healthy_creation_passes_untouched(helper_calls, shim):
    """A creation that nothing breaks reaches torch's helper with the very arguments it was called with."""
    shim()
    with world(device_id=None):
        store = c10d._world.pg_map[dist.group.WORLD][1]
        group = dist.new_group([0, 1])

        call = helper_calls[-1]
        assert (call["store"] is store, call["group_name"], call["global_ranks_in_group"]) == (
            True,
            "1",
            [0, 1],
        )
        assert dist.get_process_group_ranks(group) == [0, 1]


def test_disjoint_groups_under_one_name(helper_calls, shim):
    """Independent groups of other ranks use other keys of the store, even if their names are the same."""
    shim()
    store, seen = dist.HashStore(), []
    for rank, ranks in [(0, [0, 1]), (2, [2, 3])]:
        with world(rank=rank, store=store):
            dist.new_group(ranks, backend="other")
            seen.append(helper_calls[-1]["store"].check(["key"]))
            helper_calls[-1]["store"].set("key", "value")
            seen.append(helper_calls[-1]["store"].check(["key"]))

    assert seen == [False, True, False, True]


def test_cpu_only_group_is_not_bound(helper_calls, shim):
    """A subgroup without a backend for the world's device is made without that device."""
    shim()
    with world(rank=3):
        dist.new_group([0, 1], backend="cpu:gloo")

    assert helper_calls[-1].get("device_id") is None


def test_local_synchronization(helper_calls, shim):
    """A local-synchronization group is named by its ranks, alike on all of them, and never splits."""
    shim()
    with world(rank=0):
        before = c10d._world.group_count
        dist.new_group([0, 1], use_local_synchronization=True)
        dist.new_group([1, 0], use_local_synchronization=True)
        dist.new_group([0, 2], use_local_synchronization=True)
        names = [call["group_name"] for call in helper_calls[1:]]

        assert events == ([] if LATE else [("connect", [0, 1]), ("connect", [0, 1]), ("connect", [0, 2])])
        assert c10d._world.group_count == before
    if not LATE:  # 2.4's own names are alike on all ranks
        first, second = acting._digest((0, 1)), acting._digest((0, 2))
        assert names == [f"local_{first}_1", f"local_{first}_2", f"local_{second}_1"]


@pytest.mark.skipif(LATE, reason="2.4's own names are alike on all ranks")
def test_local_names_start_again_with_the_world(helper_calls, shim):
    """After destroy and init, ranks count local-synchronization groups from one again."""
    shim()
    for _ in range(2):
        with world(device_id=None):
            dist.new_group([0, 1], use_local_synchronization=True)

    names = [call["group_name"] for call in helper_calls if call["group_name"].startswith("local")]
    assert names == [f"local_{acting._digest((0, 1))}_1"] * 2


def _call_helper(ranks, size=2):
    """Call the helper as RL frameworks do: own store, own name, options keyword by release."""
    return c10d._new_process_group_helper(
        size, 0, ranks, "recorder", dist.HashStore(), "weights", timeout=c10d.default_pg_timeout
    )


@pytest.mark.parametrize("ranks", [[], [0, 1]])
def test_direct_helper_call(shim, ranks):
    """A direct call of the helper is made without a split and with the caller's own store and name."""
    current = shim()
    with world(rank=0):
        _call_helper(ranks)

    assert current.repairs == {"direct-helper": 1}


# Nesting and threads.


def test_nested_creation(shim):
    """A creation made while another one is under way is decided on its own, and the outer one goes on."""
    current = shim()
    with world(rank=0):
        on_create.append(lambda: _call_helper([]))
        dist.new_group([0, 1], backend="other")

    assert current.repairs == {"other-backend": 1, "direct-helper": 1}


def test_threads(shim):
    """What one thread decides does not reach a creation that another thread makes meanwhile."""
    current = shim()
    inside, done = threading.Event(), threading.Event()
    with world(rank=0):
        on_create.append(lambda: (inside.set(), done.wait(10)))
        first = threading.Thread(target=dist.new_group, args=([0, 1],), kwargs={"backend": "other"})
        first.start()
        assert inside.wait(10)
        source = c10d._get_split_source(*([dist.group.WORLD, "recorder"][: _split_source_arguments()]))
        done.set()
        first.join()

    assert isinstance(source, Recorder)
    assert current.repairs == {"other-backend": 1}


def _split_source_arguments():
    return len(inspect.signature(c10d._get_split_source).parameters)


# Call forms.


@pytest.mark.parametrize(
    "ranks",
    [[0, 1], (0, 1), range(2), np.array([0, 1]), [1, 0]],
    ids=["list", "tuple", "range", "numpy", "unsorted"],
)
@pytest.mark.parametrize("backend", ["recorder", "other"])
def test_forms_of_ranks(shim, ranks, backend):
    """Ranks may come in any form that torch takes."""
    shim()
    with world(rank=0):
        group = dist.new_group(ranks, None, backend)

        assert dist.get_process_group_ranks(group) == [0, 1]


def test_all_ranks(shim):
    """A group without ranks is one of the whole world."""
    shim()
    with world(rank=0):
        assert dist.get_process_group_ranks(dist.new_group()) == [0, 1, 2, 3]


def test_positional_device_id(shim):
    """device_id may be the ninth positional argument."""
    shim("strip")
    arguments = ("recorder", None, None, 4, 0, dist.HashStore(), "", None, DEVICE)
    dist.init_process_group(*arguments)
    try:
        assert dist.group.WORLD.bound_device_id is None
    finally:
        dist.destroy_process_group()


def test_int_device_id(shim):
    """An int is taken for the accelerator's device of that index, on releases that reject it too."""
    shim()
    with world(backend="recorder", device_id=0) as group:
        assert group.bound_device_id == torch.device("cuda", 0)


@pytest.mark.parametrize("device_id", [None, torch.device("cuda", 0)])
def test_unknown_keyword(shim, device_id):
    """A keyword that torch does not know is torch's own TypeError."""
    shim()
    with pytest.raises(TypeError, match="no_such_keyword"):
        dist.init_process_group("recorder", device_id=device_id, no_such_keyword=1)


def test_partial_and_from_import(shim):
    """A partial of the wrapped function and a name imported from the package reach the shim."""
    current = shim()
    namespace = {}
    exec("from torch.distributed import *", namespace)  # noqa: S102
    with world(rank=3):
        functools.partial(namespace["new_group"], backend="gloo")([0, 1])

        assert [] == events
    assert current.repairs == {"other-backend": 1}


def test_functional_collectives_reach_the_shim(shim):
    """What calls `_new_group_with_tag` itself is marked too, not taken for a direct helper call."""
    current = shim()
    with world(rank=3):
        c10d._new_group_with_tag([0, 1], backend="other")

    assert current.repairs == {"other-backend": 1}


# The wrapper as an object.


@pytest.mark.parametrize("name", ["init_process_group", "new_group", "_new_process_group_helper"])
def test_signature(bare, name):
    """`inspect` gives what it gave before: scripts look there for device_id and pg_options."""
    function = getattr(c10d, name)
    expected = inspect.signature(function), inspect.getfullargspec(inspect.unwrap(function))
    torchcommshim.install()
    function = getattr(c10d, name)

    assert expected == (inspect.signature(function), inspect.getfullargspec(function))


def test_removed_while_it_is_made(bare, monkeypatch):
    """What a first call prepares while the shim is taken out stays off."""
    torchcommshim.install()
    actions, made = patches._actions, patches.Actions._make

    def make(self):
        torchcommshim.uninstall()
        return made(self)

    monkeypatch.setattr(patches.Actions, "_make", make)
    actions["new_group"]

    assert {actions[name] for name in patches._present(c10d)} == {patches._pass_on}


def test_group_of_a_signal_handler(bare, monkeypatch):
    """One that a handler makes while a first call prepares the shim is torch's own; then all is as it was."""
    torchcommshim.install()
    actions, made, inner = patches._actions, patches.Actions._make, []

    def make(self):
        inner.append(actions["new_group"])
        return made(self)

    monkeypatch.setattr(patches.Actions, "_make", make)
    actions["new_group"]

    assert (inner, report.current().failures) == ([patches._pass_on], [])
    assert patches._pass_on not in actions.values()


def test_trace_folder_of_a_process_in_none(bare, monkeypatch):
    """A relative folder for traces, in a current directory that is gone, costs no more than the trace."""

    def gone():
        raise FileNotFoundError("gone")

    monkeypatch.setenv("TORCHCOMMSHIM_TRACE", "traces")
    monkeypatch.setattr(os, "getcwd", gone)
    torchcommshim.install()

    assert torchcommshim.status()["patched"] == list(patches._present(c10d))


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda f: pickle.loads(pickle.dumps(f))])  # noqa: S301
def test_copies(shim, duplicate):
    """The wrapper copies and pickles as the function does: to itself."""
    shim()

    assert duplicate(dist.new_group) is dist.new_group


def test_collectives_are_not_wrapped(bare):
    """Every function but the ones that make groups is the same object with and without the shim."""
    before = dict(vars(c10d))
    torchcommshim.install()
    changed = {name for name, value in vars(c10d).items() if before.get(name) is not value}

    assert changed == set(patches._present(c10d))


def test_late_install_reaches_copies_of_the_name(bare, monkeypatch):
    """Installing after `import torch` replaces names that modules have taken; uninstalling restores them."""
    module = type(sys)("a_users_module")
    module.new_group = dist.new_group
    monkeypatch.setitem(sys.modules, "a_users_module", module)
    original = dist.new_group
    torchcommshim.install()
    mesh = sys.modules["torch.distributed.device_mesh"]
    copies = [module.new_group, dist.new_group, mesh.new_group]
    torchcommshim.uninstall()

    assert all(map(is_ours, copies))
    assert [module.new_group, dist.new_group, mesh.new_group] == [original] * 3


def test_installing_twice(shim):
    """A second install changes nothing."""
    shim()
    first = dist.new_group
    torchcommshim.install()

    assert dist.new_group is first


def test_uninstall_beneath_another_wrapper(shim, monkeypatch):
    """Where somebody has wrapped ours, it stays beneath theirs and passes calls on."""
    shim()
    ours = c10d._get_split_source
    monkeypatch.setattr(c10d, "_get_split_source", lambda *args: ours(*args))  # noqa: PLW0108 - a wrapper
    torchcommshim.uninstall()
    with world(rank=3):
        dist.new_group([0, 1], backend="gloo")

        assert [("nocolor", DEVICE)] == events


# Strategies.


def test_observe(shim, capsys):
    """Observe says what it would do, once, and changes nothing."""
    current = shim("observe")
    with world(rank=3):
        dist.new_group([0, 1], backend="gloo")
    with world(rank=0):
        dist.new_group([1, 2], backend="gloo")

        assert [("nocolor", DEVICE)] == events
    assert current.repairs == {"other-backend": 2}
    assert 1 == capsys.readouterr().err.count("TORCHCOMMSHIM=observe")


def test_off(bare, monkeypatch):
    """Off leaves every function of torch in place."""
    monkeypatch.setenv("TORCHCOMMSHIM", "off")
    torchcommshim.install()

    assert not is_ours(dist.new_group)


def test_strip(shim, helper_calls):
    """Strip drops the device, so nothing splits, and keeps groups of other ranks apart in the store."""
    shim("strip")
    with world(rank=1) as group:
        dist.new_group([0, 1])
        own, shared = helper_calls[-1]["store"], c10d._world.pg_map[group][1]

        assert (group.bound_device_id, events) == (None, [])
        assert own is not shared


def test_strip_keeps_the_backend_that_the_device_stood_for(shim, helper_calls, monkeypatch):
    """Without a named backend, strip asks for the one that this torch would have taken for the device."""
    monkeypatch.setitem(dist.Backend.default_device_backend_map, "cuda", "recorder")
    shim("strip")
    with world(backend=None, size=1):
        pass

    assert str(helper_calls[0]["backend"]) == ("undefined" if LATE else "recorder")


def test_strip_leaves_nccl2(shim, monkeypatch):
    """A backend that nccl2's creator makes, under whatever name, keeps its device: it needs one."""
    creator = dist.Backend._plugins["NCCL-RECORDER"].creator_fn
    monkeypatch.setattr(c10d, "_create_nccl2_process_group", creator, raising=False)
    shim("strip")
    with world(backend="nccl-recorder") as group:
        assert group.bound_device_id == DEVICE


def test_split_now(shim, helper_calls):
    """Split hands late members the world's device, so they connect inside the helper with the others."""
    shim("split")
    with world(rank=0):
        dist.new_group([0, 1])

        assert (helper_calls[-1]["device_id"], events) == (DEVICE, [("connect", [0, 1])])


def test_split_makes_independent_what_cannot_split(shim):
    """Under split a gloo group is still made without a split."""
    shim("split")
    with world(rank=3):
        dist.new_group([0, 1], backend="gloo")

        assert [] == events


def test_nonblocking_mode_is_turned_off(shim, monkeypatch):
    """Where a build's non-blocking mode hangs, its switch is set before the world is made."""
    monkeypatch.delenv("TORCH_NCCL_USE_COMM_NONBLOCKING", raising=False)
    _with_traits(monkeypatch, nonblocking_by_default=True)
    shim()
    with world():
        assert os.environ.pop("TORCH_NCCL_USE_COMM_NONBLOCKING") == "0"


def test_nonblocking_mode_as_the_user_says(shim, monkeypatch):
    """The user's own choice of that switch is kept."""
    monkeypatch.setenv("TORCH_NCCL_USE_COMM_NONBLOCKING", "1")
    _with_traits(monkeypatch, nonblocking_by_default=True)
    shim()
    with world():
        assert os.environ["TORCH_NCCL_USE_COMM_NONBLOCKING"] == "1"


def _with_traits(monkeypatch, **changes):
    probe = patches.probe
    monkeypatch.setattr(patches, "probe", lambda *args: replace(probe(*args), **changes))


# What is said, and what goes wrong.


def test_one_line(shim, capsys):
    """However many groups are repaired, a process says one line, and it names the group and the report."""
    current = shim()
    with world(rank=0):
        dist.new_group([0, 1], backend="other")
        dist.new_group([0, 2], backend="other")
    said = capsys.readouterr().err

    assert current.repairs == {"other-backend": 2}
    assert (said.count("\n"), "[0,1]" in said, "pytorch/issues/145376" in said) == (1, True, True)


def test_only_the_first_rank_speaks(shim, capsys):
    """Of a creation that every rank makes, a rank other than the world's first says nothing."""
    shim()
    with world(rank=1):
        dist.new_group([0, 1], backend="other")

    assert capsys.readouterr().err == ""


def test_nothing_is_said_of_a_healthy_program(shim, capsys):
    """Without a repair there is no line."""
    shim()
    with world(device_id=None):
        dist.new_group([0, 1])

    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("owner", "part"),
    [
        (acting, "Shim"),
        (acting, "site"),
        (acting.Worlds, "begin"),
        (acting.Shim, "_describe"),
        (acting.Shim, "_plan"),
        (acting.Shim, "_local_name"),
    ],
)
def test_an_error_of_ours_leaves_the_original(bare, monkeypatch, capsys, owner, part):
    """An error in the shim is one line on stderr, and torch's function runs as it was called."""

    def broken(*_):
        raise LookupError("broken on purpose")

    monkeypatch.setattr(owner, part, broken)
    monkeypatch.setenv("TORCHCOMMSHIM_AGREEMENT", "off")
    monkeypatch.setenv("TORCHCOMMSHIM", "auto")
    torchcommshim.install()
    with world(rank=0, device_id=None):
        group = dist.new_group([0, 1], use_local_synchronization=True)

        assert dist.get_process_group_ranks(group) == [0, 1]
    expected = part != "_local_name" or not LATE
    assert ("broken on purpose" in capsys.readouterr().err) is expected


def test_error_of_torch_passes_through(shim):
    """An error of torch reaches the caller as it is, and the next creation is not mixed up by it."""
    current = shim()
    with world(rank=3):
        with pytest.raises((RuntimeError, ValueError)):
            dist.new_group([0, 99])
        dist.new_group([0, 1], backend="gloo")

    assert current.repairs == {"other-backend": 1}


@pytest.mark.skipif(not hasattr(c10d, "_use_torchcomms_enabled"), reason="this torch has no torchcomms mode")
def test_torchcomms(shim, monkeypatch):
    """In torchcomms mode the shim stands aside: here, of a direct call on a rank outside the group."""
    current = shim()
    with world(rank=3):
        with monkeypatch.context() as mode:
            mode.setattr(c10d, "_use_torchcomms_enabled", lambda: True)
            _call_helper([0, 1])
        aside = dict(current.repairs)
        _call_helper([0, 1])

    assert (aside, current.repairs) == ({}, {"direct-helper": 1})


def test_build_that_lacks_a_function(bare, monkeypatch, capsys):
    """A build that lacks what is patched is left alone; a job hears why, once, when it makes its world."""
    monkeypatch.delattr(c10d, "_get_split_source")
    monkeypatch.setenv("TORCHCOMMSHIM", "auto")
    torchcommshim.install()
    with world(device_id=None, size=1):
        pass
    said = capsys.readouterr().err

    assert not is_ours(c10d._new_process_group_helper)
    assert (said.count("\n"), "_get_split_source" in said) == (1, True)


def test_unknown_strategy_is_said_once(shim, capsys):
    """An unknown strategy costs one line that lists what is accepted."""
    shim("atuo")
    with world(rank=0, device_id=None):
        dist.new_group([0, 1])
    said = capsys.readouterr().err

    assert (said.count("\n"), "auto, strip, split, observe, off" in said) == (1, True)


def test_stripped_group_of_the_whole_world(shim, capsys):
    """Under strip a group of all ranks is made, though no defect concerns it, and nothing is said of it."""
    shim("strip")
    with world(rank=0):
        capsys.readouterr()
        group = dist.new_group(backend="other")

        assert dist.get_process_group_ranks(group) == [0, 1, 2, 3]
    assert capsys.readouterr().err == ""


def test_reinstalling_beneath_another_wrapper(shim, monkeypatch):
    """After uninstall and install, a wrapper of ours that somebody has wrapped stays switched off."""
    before = shim()
    ours = c10d._get_split_source
    monkeypatch.setattr(c10d, "_get_split_source", lambda *args: ours(*args))  # noqa: PLW0108 - a wrapper
    torchcommshim.uninstall()
    current = shim()
    with world(rank=3):
        dist.new_group([0, 1], backend="gloo")

        assert [] == events
    assert (before.repairs, current.repairs) == ({}, {"other-backend": 1})


def test_reinstalling_with_another_strategy(shim):
    """A shim that is installed again decides anew, in a world that lives, as its own strategy asks."""
    shim("observe")
    with world(rank=3):
        dist.new_group([0, 1], backend="gloo")
        torchcommshim.uninstall()
        shim("auto")
        dist.new_group([0, 1], backend="gloo")

        assert [("nocolor", DEVICE)] == events


def test_reinstalling_while_a_world_lives(shim):
    """A shim that is removed and installed again goes on counting the world's local groups where it was."""
    shim()
    with world(device_id=None):
        dist.new_group([0, 1], use_local_synchronization=True)
        torchcommshim.uninstall()
        shim()
        group = dist.new_group([0, 1], use_local_synchronization=True)

        assert dist.get_process_group_ranks(group) == [0, 1]


def test_trace_folder_is_that_of_the_start(shim, monkeypatch, tmp_path):
    """A relative folder is meant from where torch was imported, though the program goes elsewhere."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHCOMMSHIM_TRACE", "traces")
    shim()
    monkeypatch.chdir(tmp_path / "elsewhere")
    with world(device_id=None):
        dist.new_group([0, 1])

    assert {path.name for path in tmp_path.iterdir()} == {"elsewhere", "traces"}


def test_one_line_for_many_worlds(shim, capsys):
    """A job that destroys and makes its world again hears of strip once, and of a wrong variable once."""
    os.environ["TORCHCOMMSHIM_STRATEGY"] = "strip"
    try:
        shim("strip")
        for _ in range(3):
            with world(rank=0):
                pass
    finally:
        del os.environ["TORCHCOMMSHIM_STRATEGY"]
    said = capsys.readouterr().err

    assert (said.count("without its device_id"), said.count("not a variable of torchcommshim")) == (1, 1)


def test_strip_says_one_line(shim, capsys):
    """What strip did to the world is the one line, though 2.4 needs more done to a group of all ranks."""
    shim("strip")
    with world(rank=0):
        dist.new_group([0, 1, 2, 3])
        dist.new_group([0, 1], use_local_synchronization=True)
    said = capsys.readouterr().err

    assert (said.count("\n"), "without its device_id" in said) == (1, True)


def test_dry_run_compares_nothing(shim, monkeypatch):
    """One process that poses as a rank of a large world, over a backend of its own, waits for nobody."""
    shim()
    monkeypatch.setenv("TORCHCOMMSHIM_AGREEMENT", "error")
    torchcommshim.uninstall()
    torchcommshim.install()
    store = dist.HashStore()
    with world(size=64, store=store):
        assert not store.check(["torchcommshim/rank/0"])


@pytest.mark.parametrize("device_id", [torch.device("cuda"), "cuda:0", True], ids=["no index", "str", "bool"])
def test_wrong_device_id_under_strip(shim, device_id):
    """What torch would not take for a device_id is not dropped: torch raises as it does without the shim."""
    shim("strip")
    with pytest.raises((ValueError, TypeError, AttributeError)), world(device_id=device_id):
        pass


def test_missing_stderr(monkeypatch):
    """A process without stderr can be told nothing, and goes on."""
    monkeypatch.setattr(torchcommshim, "_failures", [])
    monkeypatch.setattr(sys, "stderr", None)
    torchcommshim._inactive(ImportError("no wrapt"))

    assert torchcommshim._failures == ["inactive: ImportError('no wrapt')"]
