# SPDX-License-Identifier: Apache-2.0
"""A pure model of group creation: who waits for ever, and which communicator has the wrong ranks.

A `Program` says what each rank creates and uses, in order.  `run` plays it on a torch build with given
traits, with or without the shim, and returns an `Outcome`:

    program = Program(World(4))
    pair = program.new_group([0, 1])
    program.all_reduce()
    program.all_reduce(pair)
    print(run(program, traits))  # rank 2 waits in new_group [0,1] ...

A rank goes on until it needs others; what it needs them for is a meeting.  There are four kinds:

- a split of a communicator, the world's or that of another group.  Every rank of it makes the call, and the
  k-th calls of all ranks are one round, whatever group each of them means: a call without a colour
  (NCCL_SPLIT_NOCOLOR) names none.  Each colour's ranks become a communicator.  (NCCL user guide,
  ncclCommSplit.)
- a connection through the store.  Ranks find each other under the group's store and name, and so not at
  all if these differ, and wrongly if two groups share them.
- a collective or a send, among the ranks that the communicator has, not those it should have: rank r
  contributes r + 1, so a communicator that is short of ranks shows as a wrong sum.
- the end of a communicator (ncclCommFinalize), which all its ranks come to.  `destroy_process_group` ends
  the groups of a rank in the order of their names.

Meetings are held only when no rank can go on without one.  So timing decides nothing but what becomes of
groups that share their store keys, and there the model takes a bad one: their ranks are mixed up.

Left out: time, and errors that come of it; the asynchronous half of a collective (a script that uses its
result at once is assumed); work that is outstanding on the parent during a split; groups that threads of
one process make at the same time; which backends a `split_group` is to keep, and sends in its groups on 2.5,
which split their parent; the end of the communicators of sends; the store barrier of
TORCH_DIST_INIT_BARRIER; batched sends, and unbatched ones on bound groups from
2.9 on, which use the communicator of the group's collectives; what NCCL makes of a gloo parent; torchcomms
and nccl-lazy; colours that collide; what NCCL itself gets wrong.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Union

from torchcommshim.ranges import bracketed, named
from torchcommshim.repair import creations
from torchcommshim.repair.creations import ALL, COLLECTIVE, DIRECT, LOCAL, MEMBERS, NOBODY, WORLD, Creation
from torchcommshim.repair.defects import SPLIT_BACKEND
from torchcommshim.repair.names import KnownGroups, digest, hashed_name, nested_name, part_name
from torchcommshim.repair.policy import INDEPENDENT, SPLIT_NOW, Decision, decide
from torchcommshim.repair.traits import Traits
from torchcommshim.settings import STRATEGIES

Ranks = tuple[int, ...]

# What local-synchronization names are salted with, where `Traits.local_names_differ`.
REGISTERED = "registered"  # the number of groups that this rank belongs to (2.6 to 2.13)
COUNTER = "counter"  # `group_count`, which such a creation advances on its members only (2.14 on)

# Where a rank waits.
NOCOLOR = "perform_nocolor_split"
SPLIT = "a split from the world"
CONNECT = "connecting through the store"
USE = "a collective or send"
CLOSE = "closing it"

# How a run ends, as `torchcommshim verify` calls it; of several, the first in this order.
ERROR = "error"
HANG = "hang"
WRONG = "wrong"
OK = "ok"


_CALLS = {COLLECTIVE: "new_group", LOCAL: "local new_group", DIRECT: "direct helper call"}

# A group that is made by splitting another; `SPLIT` is a place where ranks wait.
SPLIT_GROUP = creations.SPLIT


@dataclass(frozen=True)
class World:
    """The default group.

    Attributes:
        size: number of ranks.
        backend: as given to `init_process_group`, e.g. `nccl` or `cpu:gloo,cuda:nccl`.
        bound: it was given a device_id.
        splits: who can split from it: ALL (NCCL), MEMBERS (gloo that reports `supports_splitting` but
            has no `perform_nocolor_split`) or NOBODY.
    """

    size: int
    backend: str = "nccl"
    bound: bool = True
    splits: str = ALL

    @property
    def ranks(self) -> Ranks:
        return tuple(range(self.size))


@dataclass(frozen=True)
class Create:
    """One creation on one rank.

    Attributes:
        group: how this rank's later steps refer to the group; for DIRECT also its name.
        ranks: the group's ranks, in group order.
        backend: `nccl`, `gloo`, `cpu:gloo`, `cpu:gloo,cuda:nccl`, ...
        kind: COLLECTIVE, LOCAL, DIRECT or SPLIT_GROUP.  A direct call names no ranks to torch, hands it no
            device, and brings a store of its own, as RL weight synchronization does.
        parent: of a split, how this rank refers to the group that is split; `ranks` are empty where this
            rank is left out.
        parent_ranks, parts: of a split, those of the parent and of each new group.
        even: see `Creation`.
        by_mesh: a DeviceMesh splits the world, or makes its groups by `new_group` where that cannot be split.
    """

    group: str
    ranks: Ranks
    backend: str = "nccl"
    kind: str = COLLECTIVE
    parent: str = ""
    parent_ranks: Ranks = ()
    parts: tuple[Ranks, ...] = ()
    even: bool = True
    by_mesh: bool = False

    def __str__(self) -> str:
        if self.kind == SPLIT_GROUP:
            parts = " ".join(map(bracketed, self.parts))
            return f"split_group of {bracketed(self.parent_ranks)} into {parts} {self.backend}"
        return f"{_CALLS.get(self.kind, self.kind)} {bracketed(self.ranks)} {self.backend}"


@dataclass(frozen=True)
class AllReduce:
    """A collective on a group: any that waits for all its ranks, such as a barrier."""

    group: str = WORLD

    def __str__(self) -> str:
        return f"all_reduce on {self.group}"


@dataclass(frozen=True)
class SendReceive:
    """An unbatched send to, or receive from, the rank `peer` of the world, within a group."""

    group: str
    peer: int

    def __str__(self) -> str:
        return f"send/receive with rank {self.peer} in {self.group}"


@dataclass(frozen=True)
class Destroy:
    """`destroy_process_group` of a group, or of the world with all groups that the rank has."""

    group: str = WORLD

    def __str__(self) -> str:
        return f"destroy_process_group of {self.group}"


Step = Union[Create, AllReduce, SendReceive, Destroy]


class Program:
    """What each rank does: `steps[rank]` is its list.

    The methods add one step to the rank lists that have it, so calling them in order writes a program
    in which ranks agree about the order; `steps` may also be filled by hand.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.steps: list[list[Step]] = [[] for _ in world.ranks]
        self._groups: dict[str, list[Ranks]] = {WORLD: [world.ranks]}
        self._known = KnownGroups()

    def new_group(self, ranks: Iterable[int], backend: str = "nccl", kind: str = COLLECTIVE) -> str:
        """All ranks of the world make the call or, for LOCAL and DIRECT, the members; returns a label."""
        members = tuple(ranks)
        return self._create([members], backend, kind, everywhere=kind == COLLECTIVE)

    def own_groups(self, partition: Iterable[Iterable[int]], backend: str = "nccl") -> str:
        """One call on all ranks, in which each names only its own part; one label stands for all."""
        return self._create([tuple(part) for part in partition], backend, COLLECTIVE, everywhere=False)

    def split_group(
        self, parts: Iterable[Iterable[int]], parent: str = WORLD, backend: str = "", *, by_mesh: bool = False
    ) -> str:
        """All ranks of `parent` split it; `parts` are ranks in it.  One label stands for all new groups.

        Where `parent` stands for several groups, each is split so.
        """
        label, places = f"group {len(self._groups)}", [tuple(part) for part in parts]
        self._groups[label] = []
        for ranks in self._groups[parent]:
            new = tuple(tuple(ranks[place] for place in part) for part in places)
            even = all(map(self._known.are_even, new))
            for rank in ranks:
                own = next((part for part in new if rank in part), ())
                self.steps[rank].append(
                    Create(
                        label,
                        own,
                        backend or self.world.backend,
                        SPLIT_GROUP,
                        parent,
                        ranks,
                        new,
                        even,
                        by_mesh,
                    )
                )
            self._groups[label] += new
        if parent == WORLD:
            for part in self._groups[label]:
                self._known.add(part)
        return label

    def destroy(self, group: str = WORLD) -> None:
        """Every member ends the group; of the world, all its groups with it."""
        for members in self._groups[group]:
            for rank in members:
                self.steps[rank].append(Destroy(group))

    def all_reduce(self, group: str = WORLD) -> None:
        """Every member of the group takes part."""
        for members in self._groups[group]:
            for rank in members:
                self.steps[rank].append(AllReduce(group))

    def send(self, group: str, source: int, target: int) -> None:
        """`source` sends, `target` receives, both unbatched; they are ranks of the world."""
        self.steps[source].append(SendReceive(group, target))
        self.steps[target].append(SendReceive(group, source))

    def _create(self, parts: list[Ranks], backend: str, kind: str, everywhere: bool) -> str:
        label = f"group {len(self._groups)}"
        self._groups[label] = parts
        if everywhere:
            self._known.add(parts[0])
        for part in parts:
            for rank in self.world.ranks if everywhere else part:
                self.steps[rank].append(Create(label, part, backend, kind))
        return label

    def __repr__(self) -> str:
        lists = (f"rank {rank}: " + "; ".join(map(str, steps)) for rank, steps in enumerate(self.steps))
        return "\n".join([str(self.world), *lists])


@dataclass(frozen=True)
class Communicator:
    """A communicator as it came out.

    Attributes:
        number: in order of creation; tells communicators of the same ranks apart.
        ranks: that it has, ascending.
        meant: the groups that its ranks meant to connect; one, with these ranks, if all went well.
    """

    number: int
    ranks: Ranks
    meant: tuple[Ranks, ...]

    @property
    def right(self) -> bool:
        return self.meant == (self.ranks,)


@dataclass(frozen=True)
class Wait:
    """A rank that waits for ever.

    Attributes:
        rank: it.
        index, step: where in its list.
        at: NOCOLOR, SPLIT, CONNECT, USE or CLOSE.
        missing: the ranks that it waits for, ascending; empty if they came, and found another group there.
    """

    rank: int
    index: int
    step: Step
    at: str
    missing: Ranks

    def __str__(self) -> str:
        return f"rank {self.rank} waits in {self.step} ({self.at}) for {awaited(self.missing)}"


def awaited(missing: Ranks) -> str:
    """The ranks that a rank waits for; see `Wait`."""
    return named(missing) if missing else "ranks that found another group there"


@dataclass(frozen=True)
class Sum:
    """What one rank got from one collective, and what it should have got."""

    rank: int
    index: int
    value: int
    expected: int

    def __str__(self) -> str:
        return f"rank {self.rank} gets {self.value} from its step {self.index}, should get {self.expected}"


@dataclass(frozen=True)
class SplitCall:
    """One rank's part in a round: which step made the call, and the group meant (None: no colour)."""

    index: int
    colour: Ranks | None


@dataclass(frozen=True)
class Outcome:
    """How a program ends.

    Attributes:
        waiting: the ranks that wait for ever, ascending.
        raised: what was raised, by rank; that rank did nothing more.
        communicators: all that were connected, in order; the world's own too.
        sums: what each collective gave.
        rounds: the completed split rounds of the world; in each, the call of every rank.
    """

    waiting: tuple[Wait, ...] = ()
    raised: dict[int, str] = field(default_factory=dict)
    communicators: tuple[Communicator, ...] = ()
    sums: tuple[Sum, ...] = ()
    rounds: tuple[tuple[SplitCall, ...], ...] = ()

    @property
    def wrong_communicators(self) -> tuple[Communicator, ...]:
        return tuple(communicator for communicator in self.communicators if not communicator.right)

    @property
    def wrong_sums(self) -> tuple[Sum, ...]:
        return tuple(entry for entry in self.sums if entry.value != entry.expected)

    @property
    def verdict(self) -> str:
        """ERROR, HANG, WRONG or OK."""
        if self.raised:
            return ERROR
        if self.waiting:
            return HANG
        return WRONG if self.wrong_communicators or self.wrong_sums else OK

    def __str__(self) -> str:
        return "\n".join(
            [
                self.verdict,
                *(f"rank {rank} raises {error}" for rank, error in self.raised.items()),
                *map(str, self.waiting),
                *(
                    f"a communicator of {' and '.join(map(bracketed, communicator.meant))} "
                    f"has ranks {bracketed(communicator.ranks)}"
                    for communicator in self.wrong_communicators
                ),
                *map(str, self.wrong_sums),
            ]
        )


def run(
    program: Program,
    traits: Traits,
    strategy: str | Sequence[str | None] | None = None,
    salt: str = COUNTER,
) -> Outcome:
    """Play `program`.

    Args:
        program: what each rank does.
        traits: of the torch build.
        strategy: one of `settings.STRATEGIES`, None for no shim; or a sequence with one for each rank.
        salt: REGISTERED or COUNTER; matters only where `traits.local_names_differ`.

    Raises:
        ValueError: the program makes no sense: an unknown group, a rank outside the world, a backend
            or strategy that is not known, `strip` on some ranks only (init itself hangs).
    """
    if strategy is None or isinstance(strategy, str):
        strategy = [strategy] * program.world.size
    _check(program, strategy)
    return _Run(program, traits, strategy, salt).outcome()


def backends(backend: str) -> dict[str, str]:
    """The backend for each type of device: `gloo` serves cpu and cuda, `cpu:gloo` only cpu.

    Raises:
        ValueError: a backend other than gloo and nccl.
    """
    if ":" in backend:
        found = dict(part.split(":", 1) for part in backend.lower().split(","))
    else:
        found = dict.fromkeys(("cpu", "cuda") if backend.lower() == "gloo" else ("cuda",), backend.lower())
    unknown = set(found.values()) - {"gloo", "nccl"}
    if unknown:
        raise ValueError(f"backend {backend!r} is not modelled: only gloo and nccl are")
    return found


def creation_of(step: Create, world: World, *, stripped: bool = False) -> Creation:
    """What the policy is told of `step`, in a world whose device_id the shim has dropped or not."""
    return Creation(
        kind=step.kind,
        ranks=() if step.kind == DIRECT else step.parent_ranks or step.ranks,
        backend=step.backend,
        world_size=world.size,
        bound=world.bound and not stripped,
        device_backend=backends(step.backend).get("cuda"),
        world_device_backend=backends(world.backend).get("cuda"),
        world_splits=world.splits,
        divides=len(step.parts) > 1,
        partial=step.kind == SPLIT_GROUP and sum(map(len, step.parts)) < len(step.parent_ranks),
        by_mesh=step.by_mesh,
        even=step.even,
    )


def as_made(step: Create, world: World, traits: Traits, *, stripped: bool = False) -> list[Create]:
    """The steps that `step` amounts to: without a world to split, a mesh makes its groups one by one."""
    can_split = world.bound and not stripped and not traits.members_split_late
    if step.kind != SPLIT_GROUP or can_split or not step.by_mesh:
        return [step]
    return [Create(step.group, part, step.backend) for part in step.parts]


def has_split_source(creation: Creation, traits: Traits) -> bool:
    """`_get_split_source` is asked, and names the world."""
    asked = creation.bound or (traits.split_tests_size and creation.spans_world)
    fits = traits.split_ignores_backend or creation.same_backend
    return asked and fits and creation.world_splits != NOBODY


def _carrier(backend: str) -> str:
    """The backend that carries a group's collectives here: nccl where it has one."""
    return "nccl" if "nccl" in backends(backend).values() else "gloo"


def _text(name: tuple[object, ...]) -> str:
    """torch's name of a group, which decides when it is closed; that of others is any, alike on all ranks."""
    if len(name) == 3:
        ranks, _, count = name
        return hashed_name(ranks, count)  # type: ignore[arg-type]
    return str(name[0]) if len(name) == 1 else f"local_{digest(*map(str, name))}"


def _check(program: Program, strategies: Sequence[str | None]) -> None:
    world = program.world
    for what, count in (("strategies", len(strategies)), ("lists of steps", len(program.steps))):
        if count != world.size:
            raise ValueError(f"{count} {what} for {world.size} ranks")
    unknown = set(strategies) - {None, *STRATEGIES}
    if unknown:
        raise ValueError(f"strategy {unknown.pop()!r} is none of {', '.join(STRATEGIES)}")
    if "strip" in strategies and set(strategies) != {"strip"}:
        raise ValueError("strip on some ranks only: they hang inside init_process_group")
    backends(world.backend)
    sound: set[Create] = set()  # most are made by all ranks alike
    for rank, steps in enumerate(program.steps):
        groups = {WORLD: world.ranks}
        for index, step in enumerate(steps):
            try:
                if isinstance(step, Create):
                    if step.group in groups:
                        raise ValueError(f"the label {step.group!r} is taken")
                    if step not in sound:
                        _check_creation(step, world)
                        sound.add(step)
                    if step.kind == SPLIT_GROUP and groups.get(step.parent) != step.parent_ranks:
                        raise ValueError(f"this rank has no {step.parent!r} of {step.parent_ranks}")
                    groups[step.group] = step.ranks
                elif isinstance(step, Destroy):
                    if rank not in groups.pop(step.group, ()):
                        raise ValueError(f"this rank has no {step.group!r}")
                else:
                    _check_use(step, rank, groups)
            except ValueError as error:
                raise ValueError(f"rank {rank}, step {index}, {step}: {error}") from None


def _check_creation(step: Create, world: World) -> None:
    backends(step.backend)
    if step.kind == SPLIT_GROUP:
        named_ranks = [rank for part in step.parts for rank in part]
        if not all(step.parts) or len(set(named_ranks)) < len(named_ranks):
            raise ValueError("parts must have one rank or more, each rank once")
        if not step.parts or not {*named_ranks, *step.ranks} <= set(step.parent_ranks):
            raise ValueError("parts must be of the parent's ranks")
        return
    if step.kind not in _CALLS:
        raise ValueError(f"kind {step.kind!r} is none of {', '.join(_CALLS)}")
    if not step.ranks or len(set(step.ranks)) < len(step.ranks):
        raise ValueError("ranks must be one or more, each once")
    if not set(step.ranks) <= set(world.ranks):
        raise ValueError(f"a rank is outside the world of {world.size}")


def _check_use(step: AllReduce | SendReceive, rank: int, groups: dict[str, Ranks]) -> None:
    users = {rank, step.peer} if isinstance(step, SendReceive) else {rank}
    if not users <= set(groups.get(step.group, ())):
        raise ValueError(f"this rank has no {step.group!r} that holds {sorted(users)}")
    if isinstance(step, SendReceive) and step.peer == rank:
        raise ValueError("a rank cannot send to itself")


# -- meetings ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Split:
    """`parent` is split; `colour` is what torch was told of the group's ranks, None outside the group."""

    parent: Communicator
    colour: Ranks | None
    ranks: Ranks = ()


@dataclass(frozen=True)
class _Connect:
    """`ranks` connect under `key` in the store; the first of them posts the address."""

    key: tuple[object, ...]
    ranks: Ranks


@dataclass(frozen=True)
class _Use:
    """`ranks` of a communicator do something together."""

    communicator: Communicator
    ranks: Ranks
    ends: bool = False


_Meeting = Union[_Split, _Connect, _Use]
# A meeting gives each rank its communicator; a use, and a split without a colour, give None.
_Steps = Generator[_Meeting, Any, None]
_Connecting = Generator[_Meeting, Any, Communicator]


class _Raised(Exception):
    """torch raises on this rank."""


@dataclass
class _Group:
    """A group on one of its ranks.

    Attributes:
        ranks: in group order.
        backend: that carries its collectives: `nccl` if it has it.
        key: under which its ranks find each other in the store.
        name: torch's, as far as it decides in which order groups are closed.
        colour: with which it will be split from the world; None if it will not be.
        connected: its communicators, by purpose.
    """

    ranks: Ranks
    backend: str
    key: tuple[object, ...]
    name: str = "0"
    colour: Ranks | None = None
    connected: dict[tuple[object, ...], Communicator] = field(default_factory=dict)


_Plan = tuple[Creation, Decision, bool]

# The purposes of a communicator; that of two ranks which send to each other is ("pair", low, high).
_COLLECTIVES = ("collectives",)


class _Rank:
    """One rank: its counters as torch keeps them, and its groups."""

    def __init__(self, run: _Run, rank: int, strategy: str | None, world: _Group) -> None:
        self.world, self.traits, self.salt = run.program.world, run.traits, run.salt
        self.rank, self.sums, self.plans = rank, run.sums, run.plans
        self.strategy = None if strategy in (None, "observe", "off") else strategy
        self.stripped = self.world.bound and strategy == "strip"
        self.groups, self.whole = {WORLD: world}, world
        self.index = 0  # of the step under way
        self.group_count = 1
        self.registered = 1  # the world
        self.local_creations: dict[Ranks, int] = defaultdict(int)
        self.known = KnownGroups()
        self.splits: dict[str, int] = defaultdict(int)  # of each group, by its name

    def play(self, steps: Sequence[Step]) -> _Steps:
        for self.index, step in enumerate(steps):
            if isinstance(step, Create) and step.kind == SPLIT_GROUP:
                yield from self._split_group(step)
            elif isinstance(step, Create):
                yield from self._create(step)
            elif isinstance(step, Destroy):
                yield from self._destroy(step)
            elif isinstance(step, AllReduce):
                yield from self._all_reduce(self.groups[step.group])
            else:
                yield from self._send(self.groups[step.group], step.peer)

    # -- creation, in torch's order: _new_group_with_tag, then _new_process_group_helper -----------------

    def _create(self, step: Create) -> _Steps:
        member = self.rank in step.ranks
        if step.kind != COLLECTIVE and not member:
            return
        # In a large world this is most of the work, and the same for all ranks with one strategy.
        key = (step, self.strategy)
        if key not in self.plans:
            self.plans[key] = self._plan(step)
        creation, decision, source = self.plans[key]
        name = self._name(step, decision)
        if step.kind == COLLECTIVE:
            self.known.add(step.ranks)
        if member:
            yield from self._join(step, creation, decision, name, source)
        elif source and self.world.splits == MEMBERS:
            raise _Raised("AttributeError: the world's backend has no perform_nocolor_split")
        elif source:
            yield _Split(self.groups[WORLD].connected[_COLLECTIVES], None)

    def _plan(self, step: Create) -> _Plan:
        """What the policy makes of a step, and whether its members are given a source to split from."""
        creation = creation_of(step, self.world, stripped=self.stripped)
        decision = decide(creation, self.traits, self.strategy) if self.strategy else Decision()
        return creation, decision, decision.remedy != INDEPENDENT and has_split_source(creation, self.traits)

    def _join(
        self, step: Create, creation: Creation, decision: Decision, name: tuple[object, ...], source: bool
    ) -> _Steps:
        parts = backends(step.backend).values()
        key = (step.kind, step.ranks if decision.apart else (), *name)
        group = _Group(step.ranks, _carrier(step.backend), key, _text(name))
        if "gloo" in parts:
            mesh = yield _Connect((*group.key, "gloo"), step.ranks)
            if group.backend == "gloo":
                group.connected[_COLLECTIVES] = mesh
        if "nccl" in parts and source and creation.same_backend:
            group.colour = creation.ranks
        if self._is_handed_device(creation, decision):
            if creation.device_backend is None:
                raise _Raised("RuntimeError: No backend type associated with device type cuda")
            yield from self._communicator(group, step.ranks, _COLLECTIVES)
        if decision.remedy == SPLIT_NOW:
            group.colour = None  # `split_from` is cleared: sends and receives would split again
        self.groups[step.group] = group
        self.registered += 1

    def _is_handed_device(self, creation: Creation, decision: Decision) -> bool:
        """`device_id` reaches the helper, which connects the group before it returns."""
        if decision.remedy == SPLIT_NOW:
            return True
        handed = creation.bound and creation.kind != DIRECT and not self.traits.members_split_late
        return handed and not decision.unbind

    def _name(self, step: Create, decision: Decision) -> tuple[object, ...]:
        """The group's name, as `_process_group_name` makes it in each release."""
        if step.kind == DIRECT:
            return (step.group, step.ranks)  # in a store of the caller's own
        if step.kind == LOCAL and (decision.rename or not self.traits.local_names_differ):
            # Up to 2.5 the ranks are hashed, again for each earlier group of the same ranks: one count
            # of them is the same thing.  `rename` makes the shim's name, and leaves group_count alone.
            self.local_creations[step.ranks] += 1
            return (step.ranks, self.local_creations[step.ranks])
        if step.kind == LOCAL and self.salt == REGISTERED:
            return (step.ranks, "salt", self.registered)
        name = (step.ranks, "salt", self.group_count) if step.kind == LOCAL else (self.group_count,)
        self.group_count += 1
        return name

    # -- split_group ---------------------------------------------------------------------------------------

    def _split_group(self, step: Create) -> _Steps:
        made = as_made(step, self.world, self.traits, stripped=self.stripped)
        if made != [step]:
            for each in made:
                yield from self._create(each)
            return
        if self.traits.members_split_late:
            raise _Raised("AttributeError: this torch has no split_group")
        if not self.world.bound or self.stripped:
            raise _Raised("RuntimeError: No device associated with the default pg, not safe to split")
        key = (step, self.strategy)
        if key not in self.plans:
            self.plans[key] = self._plan(step)
        _, decision, _ = self.plans[key]
        if (
            SPLIT_BACKEND.present(self.traits)
            and ":" in step.backend
            and SPLIT_BACKEND not in decision.defects
        ):
            raise _Raised("AssertionError: Unknown c10d backend type")
        yield from self._split(step)

    def _split(self, step: Create) -> _Steps:
        parent, parts = self.groups[step.parent], backends(step.backend).values()
        self.splits[parent.name] += 1
        name = self._split_name(step, parent)
        if step.parent == WORLD:
            for part in step.parts:
                self.known.add(part)
        in_python = self.traits.split_counts_members  # up to 2.8: of the world's store, and NCCL alone
        group = _Group(
            step.ranks, _carrier(step.backend), (*(() if in_python else parent.key), "split", name), name
        )
        if step.ranks and "gloo" in parts and not in_python:
            mesh = yield _Connect((*group.key, "gloo"), step.ranks)
            if group.backend == "gloo":
                group.connected[_COLLECTIVES] = mesh
        if "nccl" in parts:
            communicator = yield self._part(group, parent)
            if step.ranks:
                group.connected[_COLLECTIVES] = communicator
        if step.ranks:
            self.groups[step.group] = group
            self.registered += 1

    def _part(self, group: _Group, parent: _Group) -> _Meeting:
        whole = parent.connected.get(_COLLECTIVES)
        if whole is None:
            raise _Raised("RuntimeError: Parent process group backend is not initialized")
        return _Split(whole, group.ranks or None, group.ranks)

    def _split_name(self, step: Create, parent: _Group) -> str:
        """The name of the part that this rank is in; see `shim`."""
        part, nested = step.ranks or step.parts[0], len(step.parent_ranks) < self.world.size
        differ, counts = self.traits.split_names_differ, self.traits.split_counts_parent
        if self.strategy and differ and step.parent == WORLD:
            name = self.known.name(part)
        elif self.strategy and (differ or (counts and nested)):
            name = nested_name(parent.name, part, self.splits[parent.name])
        elif differ:
            name = hashed_name(list(map(step.parent_ranks.index, part)), self.registered)
        else:
            name = self._counted_name(step, part)
        return name

    def _counted_name(self, step: Create, part: Ranks) -> str:
        """A name by `group_count`, into which 2.14 and later hash the part."""
        is_hashed = self.traits.local_names_differ and self.salt == COUNTER
        places = list(map(step.parent_ranks.index, part))
        name = hashed_name(places, self.group_count) if is_hashed else str(self.group_count)
        is_skipped = self.traits.split_counts_members and not step.ranks
        is_repaired = bool(self.strategy) and len(step.parent_ranks) == self.world.size
        if self.traits.split_counts_parent and (is_repaired or not is_skipped):
            self.group_count += 1
        is_apart = self.strategy and self.traits.split_names_shared and len(step.parts) > 1
        return part_name(name, part) if is_apart else name

    # -- the end -------------------------------------------------------------------------------------------

    def _destroy(self, step: Destroy) -> _Steps:
        if step.group != WORLD:
            yield from self._close(self.groups.pop(step.group))
            self.registered -= 1
            return
        for group in sorted(self.groups.values(), key=lambda group: group.name, reverse=True):
            yield from self._close(group)
        self.groups.clear()

    def _close(self, group: _Group) -> _Steps:
        """NCCL waits for all ranks of a communicator (ncclCommFinalize), gloo for none."""
        communicator = group.connected.get(_COLLECTIVES)
        if group.backend == "nccl" and communicator is not None:
            yield _Use(communicator, communicator.ranks, ends=True)

    # -- use -------------------------------------------------------------------------------------------

    def _all_reduce(self, group: _Group) -> _Steps:
        communicator = yield from self._communicator(group, group.ranks, _COLLECTIVES)
        yield _Use(communicator, communicator.ranks)
        value, expected = (sum(rank + 1 for rank in ranks) for ranks in (communicator.ranks, group.ranks))
        self.sums.append(Sum(self.rank, self.index, value, expected))

    def _send(self, group: _Group, peer: int) -> _Steps:
        pair = (min(self.rank, peer), max(self.rank, peer))
        if group.backend == "gloo":  # its mesh carries sends too
            communicator = group.connected[_COLLECTIVES]
        else:
            purpose = ("pair", *sorted(map(group.ranks.index, pair)))
            communicator = yield from self._communicator(group, pair, purpose)
        yield _Use(communicator, pair)

    def _communicator(self, group: _Group, ranks: Ranks, purpose: tuple[object, ...]) -> _Connecting:
        """The communicator of `ranks` in a group, connected on first use."""
        if purpose not in group.connected:
            group.connected[purpose] = yield self._way(group, ranks, purpose)
        return group.connected[purpose]

    def _way(self, group: _Group, ranks: Ranks, purpose: tuple[object, ...]) -> _Meeting:
        """How a communicator is connected: by a split if the group has a parent that is connected itself."""
        splits = purpose == _COLLECTIVES or self.traits.point_to_point_splits
        world = self.groups[WORLD].connected.get(_COLLECTIVES)
        if group.colour is not None and splits and world is not None:
            return _Split(world, group.colour, ranks)
        return _Connect((*group.key, *purpose), ranks)


class _Run:
    """Lets ranks go on until each waits, holds the meetings that can be held, and repeats."""

    def __init__(self, program: Program, traits: Traits, strategies: Sequence[str | None], salt: str) -> None:
        self.program, self.traits, self.salt = program, traits, salt
        self.sums: list[Sum] = []
        self.plans: dict[tuple[Create, str | None], _Plan] = {}
        self.communicators: list[Communicator] = []
        self.rounds: list[tuple[SplitCall, ...]] = []
        self.raised: dict[int, str] = {}
        self.waiting: dict[int, _Meeting] = {}
        self.taken: set[tuple[object, ...]] = set()  # store keys under which ranks have connected
        self.ranks = [
            _Rank(self, rank, strategy, group)
            for rank, (strategy, group) in enumerate(zip(strategies, self._worlds(strategies)))
        ]
        self.steps = [rank.play(steps) for rank, steps in zip(self.ranks, program.steps)]

    def outcome(self) -> Outcome:
        for rank in self.program.world.ranks:
            self._go_on(rank, None)
        while True:
            held = list(self._meetings())
            if not held:
                break
            for rank, communicator in held:
                self._go_on(rank, communicator)
        return Outcome(
            waiting=tuple(self._wait(rank, meeting) for rank, meeting in sorted(self.waiting.items())),
            raised=dict(sorted(self.raised.items())),
            communicators=tuple(self.communicators),
            sums=tuple(sorted(self.sums, key=lambda entry: (entry.rank, entry.index))),
            rounds=tuple(self.rounds),
        )

    def _worlds(self, strategies: Sequence[str | None]) -> Iterator[_Group]:
        """The default group on each rank: a gloo world and a bound one are connected from the start."""
        world = self.program.world
        backend = _carrier(world.backend)
        whole = None
        for strategy in strategies:
            group = _Group(world.ranks, backend, (WORLD,))
            if backend == "gloo" or (world.bound and strategy != "strip"):
                whole = whole or self._connected(world.ranks, [world.ranks])
                group.connected[_COLLECTIVES] = whole
            yield group

    def _go_on(self, rank: int, communicator: Communicator | None) -> None:
        self.waiting.pop(rank, None)
        try:
            self.waiting[rank] = self.steps[rank].send(communicator)
        except StopIteration:
            pass
        except _Raised as error:
            self.raised[rank] = str(error)

    # -- meetings: each yields who goes on, and with which communicator -------------------------------------

    def _meetings(self) -> Iterator[tuple[int, Communicator | None]]:
        yield from self._split()
        connecting: dict[tuple[object, ...], list[int]] = defaultdict(list)
        using: dict[_Use, list[int]] = defaultdict(list)
        for rank, meeting in sorted(self.waiting.items()):
            if isinstance(meeting, _Connect):
                connecting[meeting.key].append(rank)
            elif isinstance(meeting, _Use):
                using[meeting].append(rank)
        for key, ranks in connecting.items():
            yield from self._connect(key, ranks)
        for use, ranks in using.items():
            if set(use.ranks) <= set(ranks):
                yield from ((rank, None) for rank in ranks)

    def _split(self) -> Iterator[tuple[int, Communicator | None]]:
        parents: dict[Communicator, dict[int, _Split]] = defaultdict(dict)
        for rank, meeting in sorted(self.waiting.items()):
            if isinstance(meeting, _Split):
                parents[meeting.parent][rank] = meeting
        for parent, calls in parents.items():
            if set(parent.ranks) <= calls.keys():
                yield from self._round(parent, calls)

    def _round(
        self, parent: Communicator, calls: dict[int, _Split]
    ) -> Iterator[tuple[int, Communicator | None]]:
        ranks = sorted(calls)
        if parent is self.ranks[0].whole.connected.get(_COLLECTIVES):
            self.rounds.append(tuple(SplitCall(self.ranks[rank].index, calls[rank].colour) for rank in ranks))
        made: dict[Ranks | None, Communicator | None] = {None: None}
        for rank in ranks:
            colour = calls[rank].colour
            if colour not in made:
                same = [other for other in ranks if calls[other].colour == colour]
                made[colour] = self._connected(same, [calls[other].ranks for other in same])
            yield rank, made[colour]

    def _connect(self, key: tuple[object, ...], ranks: list[int]) -> Iterator[tuple[int, Communicator]]:
        """Ranks that share a key connect once all places are filled.

        The store keeps one address for a key.  Where two groups share it, the last that posts one is
        found, by whoever comes first; later ranks find an address at which nobody answers any more.
        A group of one needs no address.
        """
        group_of = {rank: self.waiting[rank].ranks for rank in ranks}
        for rank in ranks:
            if len(group_of[rank]) == 1:
                yield rank, self._connected([rank], [group_of[rank]])
        places: dict[int, list[int]] = defaultdict(list)
        for rank in ranks:
            places[group_of[rank].index(rank)].append(rank)
        if key in self.taken or 0 not in places:
            return
        first = places[0][-1]
        size = len(group_of[first])
        if size == 1 or any(place not in places for place in range(size)):
            return
        self.taken.add(key)
        met = [first, *(places[place][0] for place in range(1, size))]
        communicator = self._connected(met, [group_of[rank] for rank in met])
        yield from ((rank, communicator) for rank in met)

    def _connected(self, ranks: Iterable[int], meant: Iterable[Ranks]) -> Communicator:
        groups = sorted({tuple(sorted(group)) for group in meant})
        communicator = Communicator(len(self.communicators), tuple(sorted(ranks)), tuple(groups))
        self.communicators.append(communicator)
        return communicator

    def _wait(self, rank: int, meeting: _Meeting) -> Wait:
        if isinstance(meeting, _Split):
            at = NOCOLOR if meeting.colour is None else SPLIT
            wanted = meeting.parent.ranks
            there = {
                other
                for other, its in self.waiting.items()
                if isinstance(its, _Split) and its.parent == meeting.parent
            }
        else:
            at, wanted = CONNECT, meeting.ranks
            if isinstance(meeting, _Use):
                at = CLOSE if meeting.ends else USE
            there = {other for other, its in self.waiting.items() if its == meeting}
        index = self.ranks[rank].index
        missing = tuple(sorted(set(wanted) - there))
        return Wait(rank, index, self.program.steps[rank][index], at, missing)
