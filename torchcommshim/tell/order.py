# SPDX-License-Identifier: Apache-2.0
"""Do all ranks make the same groups in the same order?  `TORCHCOMMSHIM_CHECK_ORDER=1`.

Before a creation enters NCCL or gloo, ranks compare it through the world's store.  `new_group` is a call of
every rank of the world, and its n-th calls belong together: all ranks meet there, as they do under torch's
own TORCH_DIST_INIT_BARRIER=1.  Either all name the same list, or, where torch can tell their groups apart,
each names a list that all its members name.  Two sums over the ranks tell, however many there are.  Creations
that only some ranks make are compared by their own members, who wait for each other only where torch makes
them wait.

What other ranks have posted is read on the slow path alone: when the sum does not come out, or somebody is
late.  Then the rank that came first looks out for all that wait there, and what it finds becomes a verdict in
the store, which every waiting rank raises.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
import uuid
from collections import Counter
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import Any, Callable, Collection, Generator, Iterable, Iterator, Sequence

from torchcommshim import settings
from torchcommshim.ranges import expanded, named, shortened
from torchcommshim.repair.calls import Call
from torchcommshim.repair.creations import COLLECTIVE, DIRECT, LOCAL, SPLIT, WORLD
from torchcommshim.repair.torch_state import TorchState
from torchcommshim.repair.worlds import NONBLOCKING_SWITCH
from torchcommshim.tell import members
from torchcommshim.tell.agreement import PREFIX
from torchcommshim.tell.report import Report, say

_LOOK_AFTER_S = 1.0
_LOOKOUT_FIRST_S = 10.0  # a rank whose lookout has died times out by itself, this much later
_NAMED_AT_MOST = 8
_SILENT = "no creation yet, or TORCHCOMMSHIM_CHECK_ORDER is off there"
_NO_WORLD = (
    "rank {} has nobody to compare its creation at {} with: rank 0 did not make the world within the store's "
    "time-out, or TORCHCOMMSHIM_CHECK_ORDER is off there [TCS-order-alone]"
)

# A wait: each item is a pause to make before the next step, in seconds.
Steps = Generator[float, None, None]
# A counter in the store, and its value once all have come.
Meeting = tuple[str, int]


class OrderError(RuntimeError):
    """Ranks do not make the same groups in the same order; the message names each version and its line."""


class _StoppedError(Exception):
    """Another rank compares no more."""


class _ReplacedError(Exception):
    """The keys in use were left in the store by an earlier world."""


class OrderCheck:
    """Compares each creation with the other ranks before torch makes it."""

    def __init__(self, current: Report, state: TorchState) -> None:
        self._report, self._state = current, state
        # By rank, not by process: ranks may be threads (torch's MultiThreadedTestCase).
        self._worlds: dict[int, Comparison] = {}

    def begin(self, call: Call, store: Any) -> None:
        """Compare `call` with what other ranks make; if it is the world's own, take its store.

        Raises:
            OrderError: they make something else, wait for each other, or did not come within the time-out
                of the store.
        """
        if call.world_size < 2 or not call.shared:
            return
        if call.kind == WORLD:
            self._worlds.pop(call.rank, None)
            with self._guard(call):
                self._worlds[call.rank] = self._open(call, store)
        elif call.rank in self._worlds:  # else the world was made before the shim was installed
            with self._guard(call):
                self._compare(call, self._worlds[call.rank])

    def end(self, call: Call, error: BaseException | None) -> None:
        """Take the keys of a new world: rank 0 has named them, as a rule, since torch has waited for it."""
        if call.kind == WORLD and call.rank in self._worlds and error is None:
            with self._guard(call):
                self._worlds[call.rank].join()

    def _open(self, call: Call, store: Any) -> Comparison:
        # The world's store will be a PrefixStore of the world's name, and that is how it joins keys.
        board = Board(store, f"{call.name}//{PREFIX}/order/")
        comparison = Comparison(board, call.rank, call.world_size, store.timeout.total_seconds())
        comparison.open()
        return comparison

    def _compare(self, call: Call, comparison: Comparison) -> None:
        # A rank has one order of the calls that all ranks make, so its threads take turns there.
        with comparison.turns if call.kind == COLLECTIVE else nullcontext():
            for pause in comparison.check(call, waits=self._waits(call), apart=self._apart(call)):
                time.sleep(pause)

    @contextmanager
    def _guard(self, call: Call) -> Iterator[None]:
        """Let nothing but an OrderError out; after any error, this rank compares no more in this world."""
        try:
            yield
        except OrderError as error:
            self._worlds.pop(call.rank, None)
            raise OrderError(str(error)) from None  # how it was found out tells the user nothing
        except _StoppedError as stopped:
            self._worlds.pop(call.rank, None)
            if call.rank == 0:
                say(f"ranks compare the order of creations no more: {stopped} [TCS-order-stopped]")
        except Exception as error:  # the store is gone, likely with the rank that held it
            comparison = self._worlds.pop(call.rank, None)
            if comparison is not None:
                comparison.give_up(error)
            self._report.failed("order", error)

    def _waits(self, call: Call) -> bool:
        """Does torch wait for all members when it makes a local group?  Else the check must not either.

        All ranks of a parent split it, whatever its backend waits for.
        """
        if call.kind != LOCAL:
            return call.kind == SPLIT
        backends, device = self._state.backends(call.backend), self._state.world.bound_device_id
        if "gloo" in backends.values():
            return os.environ.get("TORCH_GLOO_LAZY_INIT", "0") in ("", "0")
        traits, nonblocking = self._report.traits, os.environ.get(NONBLOCKING_SWITCH)
        if device is None or backends.get(device.type) != "nccl" or traits.members_split_late:
            return False
        if nonblocking is None:
            return not traits.connects_without_waiting
        return nonblocking.lower() in settings.OFF

    def _apart(self, call: Call) -> bool:
        """May ranks each name their own group in one call, though torch gives all of them one name?

        They are told apart by the prefix that the shim gives to their keys, or by their colours where all
        ranks split.
        """
        if call.kind != COLLECTIVE or self._report.settings.acts:
            return True
        device = self._state.world.bound_device_id
        if device is None:
            return False
        backend, world_backend = self._state.backends(call.backend), self._state.world_backends()
        return backend.get(device.type) == world_backend.get(device.type)


class Comparison:
    """One rank's side of the comparison, in one world.

    Attributes:
        turns: held by the thread that is in a call of all ranks.
    """

    def __init__(self, root: Board, rank: int, size: int, timeout_s: float) -> None:
        """`root`: the keys of all worlds over this store; `timeout_s`: how long to wait for other ranks."""
        self.turns = threading.Lock()
        self._root, self._rank, self._size, self._timeout_s = root, rank, size, timeout_s
        self._stale = ""
        self._use("")
        self._in_doubt = False
        # As many ranks asking cost the store no more than they cost by coming.
        self._first_pause, self._longest_pause = 1e-3 + 2e-5 * size, 0.25 + 2.5e-4 * size
        self._lock = threading.Lock()
        self._made: Counter[tuple[object, ...]] = Counter()
        self._threads: set[int] = set()

    def open(self) -> None:
        """Rank 0 names the world's keys: the store may hold those of worlds before it, and of dead jobs."""
        if self._rank == 0:
            self._use(uuid.uuid4().hex[:8])
            self._root.set("token", self._token)

    def join(self) -> bool:
        """Take the world's keys, if rank 0 has named them; those that this rank has used before are old."""
        token = self._token or self._root.get("token")
        if not self._token and token and token != self._stale:
            if self._root.add(f"{token}/joined/{self._rank}", 1) == 1:
                self._use(token)
            else:
                self._stale = token
        return bool(self._token)

    def check(self, call: Call, *, waits: bool, apart: bool = True) -> Steps:
        """Compare `call`.

        Args:
            call: what this rank is about to make; not the world.
            waits: wait for the members of a group that not all ranks make.
            apart: groups of several ranks may share one call of all ranks.

        Raises:
            OrderError: see `OrderCheck.begin`.
        """
        with self._lock:
            self._threads.add(threading.get_ident())
            made = (call.kind, *([] if call.kind == COLLECTIVE else [_makers(call), _own_name(call)]))
            self._made[made] += 1
            turn = self._made[made]
        while True:
            try:
                yield from self._wait(self.join, lambda: _NO_WORLD.format(self._rank, call.site))
                if call.kind == COLLECTIVE:
                    yield from self._meet_all(call, turn, apart)
                elif _makers(call):
                    yield from self._meet_members(call, turn, waits)
                return
            except _ReplacedError:
                self._stale = self._token
                self._use("")

    def give_up(self, error: Exception) -> None:
        """Let those that wait for this rank know that it compares no more, if that can be done."""
        with suppress(Exception):  # else they name this rank when they time out
            self._board.first("verdict", _verdict(f"rank {self._rank}: {error!r}", is_error=False))

    def _use(self, token: str) -> None:
        self._token, self._board, self._sums = token, self._root.below(token), Counter[str]()

    def _meet_all(self, call: Call, turn: int, apart: bool) -> Steps:
        # The first call is compared twice: among keys that a crashed attempt has left, a rank may pass the
        # first time on what the dead have posted, but none of them can have come to the second.
        self._in_doubt = turn == 1
        for index in (0, 1) if turn == 1 else (turn,):
            post = self._post(call, turn, "arrived", self._size * (index + 1), apart)
            # Nobody is two calls ahead of anybody, so two keys of each serve in turn.
            same, own = f"same/{index % 2}", f"own/{index % 2}"
            self._board.add(same, _weight(*post.version))
            self._board.add(own, _share(post))
            lookout = yield from self._arrive(post)
            all_same = self._added(same) == self._size * _weight(*post.version)
            each_own = self._added(own) == 0
            if not all_same and not each_own:
                yield from self._settle(lookout, index)
        self._in_doubt = False

    def _added(self, key: str) -> int:
        """What has been added to a sum since this was last asked."""
        before, self._sums[key] = self._sums[key], self._board.add(key)
        return self._sums[key] - before

    def _settle(self, lookout: Lookout, index: int) -> Steps:
        """All have come, but not with one list, nor each with its own: the lookout reads what they posted."""

        def is_settled() -> bool:
            self._heed()
            return int(self._board.get("settled") or -1) >= index

        if lookout.is_mine:
            self._condemn(lookout.difference())
            self._board.set("settled", str(index))
        else:
            yield from self._wait(is_settled, lookout.difference, lookout)

    def _meet_members(self, call: Call, turn: int, waits: bool) -> Steps:
        ranks = _makers(call)
        key = f"{call.kind}/{_digest(ranks, _own_name(call))}/{turn}"
        post = self._post(call, turn, f"{key}/arrived", len(ranks) if waits else 0)
        first = Post.load(self._board.first(f"{key}/first", post.dump()))
        self._condemn(_difference([first, post]))
        if waits:
            yield from self._arrive(post)

    def _post(self, call: Call, turn: int, counter: str, target: int, apart: bool = True) -> Post:
        made = call.rank, call.number, call.kind, _makers(call), call.backend, call.site
        threaded = len(self._threads) > 1
        post = Post(*made, turn, counter, target, apart, threaded, parts=_parts(call))
        self._board.set(f"{post.channel}/{self._rank}", post.dump())
        return post

    def _arrive(self, post: Post) -> Generator[float, None, Lookout]:
        """Come to a meeting, and wait for the others; the one who came first looks out for all."""
        came = self._board.add(post.counter, 1)
        lookout = Lookout(self._board, self._size, post, came)
        if came < post.target:
            yield self._first_pause
            yield from self._wait(lookout.is_complete, lookout.absence, lookout)
        return lookout

    def _wait(
        self, done: Callable[[], bool], overdue: Callable[[], str | None], lookout: Lookout | None = None
    ) -> Steps:
        """Wait until `done`; after the time-out, go on unless `overdue` finds fault."""
        waited, pause, next_look = 0.0, self._first_pause, _LOOK_AFTER_S
        late_s = _LOOKOUT_FIRST_S if lookout is not None and not lookout.is_mine else 0.0
        while not done():
            if lookout is not None and waited >= _LOOK_AFTER_S:
                self._heed()
            if lookout is not None and lookout.is_mine and waited >= next_look:
                self._condemn(lookout.difference() or lookout.deadlock())
                next_look = waited + _LOOK_AFTER_S if lookout.suspects else 2 * waited
            if waited >= self._timeout_s + late_s:
                self._condemn(overdue())
                return
            yield pause
            waited += pause
            pause = min(2 * pause, self._longest_pause)

    def _condemn(self, finding: str | None) -> None:
        """Make what was found the verdict for all that wait; the first one stands."""
        if finding is not None:
            self._doubt()
            verdict = json.loads(self._board.first("verdict", _verdict(finding, is_error=True)))
            raise OrderError(verdict["text"] if verdict["is_error"] else finding)

    def _heed(self) -> None:
        self._doubt()
        text = self._board.get("verdict")
        if text is not None:
            verdict = json.loads(text)
            raise (OrderError if verdict["is_error"] else _StoppedError)(verdict["text"])

    def _doubt(self) -> None:
        if self._in_doubt and self._rank != 0 and self._root.get("token") != self._token:
            raise _ReplacedError


class Lookout:
    """Reads what other ranks have posted, for all that wait in one creation.

    Attributes:
        is_mine: this rank came first, so it is the lookout.
        suspects: a circle that the last look has found.
    """

    def __init__(self, board: Board, size: int, post: Post, came: int) -> None:
        """`post`: this rank's; `came`: what the meeting's counter was with it."""
        self._board, self._size, self._post = board, size, post
        self.is_mine = came == post.target - len(self._members(post)) + 1
        self._present = {post.rank: post}
        self.suspects: set[Post] = set()

    def is_complete(self) -> bool:
        """All have come."""
        return self._board.add(self._post.counter) >= self._post.target

    def difference(self) -> str | None:
        """How those that have come differ, if they do."""
        self._absent()
        return _difference(self._present.values())

    def deadlock(self) -> str | None:
        """Who waits for whom, if that is a circle, and has been one at the last look: it then is for good."""
        waiting: dict[Meeting, dict[Meeting, Post]] = {}  # which meetings does one wait for, by whom
        unread = [self._post]
        while unread:
            post = unread.pop()
            if post.meeting not in waiting:
                blocked = [last for rank in self._absent(post) if (last := self._blocked(rank))]
                waiting[post.meeting] = {last.meeting: last for last in blocked}
                unread += blocked
        known, self.suspects = self.suspects, set()
        try:
            TopologicalSorter(waiting).prepare()
        except CycleError as error:
            circle: list[Meeting] = error.args[1][::-1]  # each waits for the next; the last is the first
            links = [waiting[meeting][after] for meeting, after in zip(circle, circle[1:])]
            # A rank that makes groups in several threads may be in one and still come to the other.
            if not any(link.threaded for link in links):
                self.suspects = set(links)
                return _circle(links) if known == self.suspects else None
        return None

    def absence(self) -> str | None:
        """Who has not come, if anybody, and where each was last."""
        lines = []
        for rank in (absent := self._absent())[:_NAMED_AT_MOST]:
            last = self._last(rank)
            lines.append(f"  rank {rank}: " + (last.line if last is not None else _SILENT))
        if not lines:
            return None
        head = f"ranks did not come to {self._post.name}; here is where each was last: [TCS-order-absent]"
        waits = f"  rank {self._post.rank} waits for them: {self._post.line}"
        rule = _members_rule(self._present.values(), absent)
        return "\n".join([head, *lines, *_and_more(absent), waits, *rule])

    def _members(self, post: Post) -> Sequence[int]:
        return range(self._size) if post.kind == COLLECTIVE else post.ranks

    def _absent(self, post: Post | None = None) -> list[int]:
        """Who has not come to a meeting; to this one, if none is given."""
        post = post or self._post
        present = self._present if post.meeting == self._post.meeting else {}
        for rank in self._members(post):
            if rank not in present:
                theirs = self._read(post.channel, rank)
                if theirs is not None and theirs.meeting == post.meeting:
                    present[rank] = theirs
        return [rank for rank in self._members(post) if rank not in present]

    def _blocked(self, rank: int) -> Post | None:
        """Where `rank` waits for others, if it does."""
        last = self._last(rank)
        waits = last is not None and last.target and self._board.add(last.counter) < last.target
        return last if waits else None

    def _last(self, rank: int) -> Post | None:
        posts = [self._read(channel, rank) for channel in ("collective", "other")]
        return max(filter(None, posts), key=lambda post: post.number, default=None)

    def _read(self, channel: str, rank: int) -> Post | None:
        text = self._board.get(f"{channel}/{rank}")
        return None if text is None else Post.load(text)


@dataclass(frozen=True)
class Post:
    """What a rank tells the others of a creation.

    Attributes:
        rank, number, kind, ranks, backend, site: as in `Call`.
        turn: of this rank's creations of that kind, from 1; of those of the same ranks, unless all make it.
        counter, target: all have come when the counter has reached the target; 0 if the rank does not wait.
        apart: groups of several ranks may share the call.
        threaded: this rank has made groups in several threads.
        parts: of a split, whose `ranks` are the parent's: those of each new group.
    """

    rank: int
    number: int
    kind: str
    ranks: tuple[int, ...]
    backend: str
    site: str
    turn: int
    counter: str = ""
    target: int = 0
    apart: bool = True
    threaded: bool = False
    parts: str = ""

    def dump(self) -> str:
        """As JSON, in which a regular list of ranks is short."""
        return json.dumps({**vars(self), "ranks": shortened(self.ranks)}, separators=(",", ":"))

    @classmethod
    def load(cls, text: str) -> Post:
        """What `dump` made."""
        fields = json.loads(text)
        return cls(**{**fields, "ranks": expanded(fields["ranks"])})

    @property
    def meeting(self) -> Meeting:
        """Equal on all ranks that wait for each other."""
        return self.counter, self.target

    @property
    def channel(self) -> str:
        """Where a rank posts such creations: one of each may be under way, in threads."""
        return "collective" if self.kind == COLLECTIVE else "other"

    @property
    def version(self) -> tuple[tuple[int, ...], str, str]:
        """What must be equal on all members."""
        return self.ranks, self.backend, self.parts

    @property
    def shares(self) -> bool:
        """Other lists may be named in the same call: nobody meets in a group of one."""
        return self.apart or len(self.ranks) == 1

    @property
    def name(self) -> str:
        """Which creation it is, among those that it is compared with."""
        call = f"split_group of [{shortened(self.ranks)}]" if self.kind == SPLIT else self._made
        return f"call {self.turn} of " + ("new_group" if self.kind == COLLECTIVE else call)

    @property
    def line(self) -> str:
        """What is made, and where."""
        return f"creation {self.number}, {self._made} ({self.backend}), at {self.site}"

    @property
    def _made(self) -> str:
        if self.kind == SPLIT:
            return f"split_group of [{shortened(self.ranks)}] into {self.parts}"
        what = {COLLECTIVE: "new_group", LOCAL: "the local group", DIRECT: "the direct group"}[self.kind]
        return f"{what} [{shortened(self.ranks)}]"  # not cut: two lists may differ at their ends only


class Board:
    """Keys under one prefix of a store; no operation waits for another rank."""

    def __init__(self, store: Any, prefix: str) -> None:
        self._store, self._prefix = store, prefix

    def below(self, name: str) -> Board:
        """The keys under `name`."""
        return Board(self._store, f"{self._prefix}{name}/")

    def set(self, key: str, text: str) -> None:
        """Set it."""
        self._store.set(self._prefix + key, text)

    def get(self, key: str) -> str | None:
        """What stands there, None if nothing does: the store's own `get` would wait for it."""
        key = self._prefix + key
        return str(self._store.get(key).decode()) if self._store.check([key]) else None

    def add(self, key: str, amount: int = 0) -> int:
        """Add to a counter; returns its value."""
        return int(self._store.add(self._prefix + key, amount))

    def first(self, key: str, text: str) -> str:
        """Set it unless somebody has; returns what stands there."""
        return str(self._store.compare_set(self._prefix + key, "", text).decode())


def _own_name(call: Call) -> str:
    """The name that tells creations of the same ranks apart: the caller's, or of a split the parent's."""
    if call.split is not None:
        return call.split.parent
    return call.name if call.kind == DIRECT else ""


def _makers(call: Call) -> tuple[int, ...]:
    """The ranks that make the creation together, unless all ranks of the world do."""
    return call.ranks if call.split is None else call.split.ranks


def _parts(call: Call) -> str:
    return " ".join(f"[{shortened(part)}]" for part in call.split.parts) if call.split else ""


def _digest(*values: object) -> str:
    return hashlib.sha256(repr(values).encode()).hexdigest()[:16]


def _weight(*what: object) -> int:
    """31 bits that stand for it."""
    return int(_digest(*what), 16) & 0x7FFFFFFF


def _share(post: Post) -> int:
    """What a rank adds to the sum that tells whether each rank names its own list.

    The shares of a list's members are nothing together, if all of them name it.  For a list that is not the
    rank's own, or that all ranks are to name, it adds something that nobody takes away.
    """
    if post.rank not in post.ranks or not post.shares:
        return _weight("outside", *post.version)
    return _weight(*post.version) * (len(post.ranks) - 1 if post.rank == post.ranks[0] else -1)


def _difference(posts: Iterable[Post]) -> str | None:
    """How posts of one creation differ: a list that its members, or all ranks, were to name, they do not."""
    by_version: dict[object, list[Post]] = {}
    of_rank: dict[int, Post] = {}
    for post in sorted(posts, key=lambda post: post.rank):
        by_version.setdefault(post.version, []).append(post)
        of_rank[post.rank] = post
    differing = set()
    for version, (first, *_) in by_version.items():
        concerned = first.ranks if first.shares else of_rank
        others = {of_rank[rank].version for rank in concerned if rank in of_rank} - {version}
        differing |= others | ({version} if others else set())
    if not differing:
        return None
    firsts, more = [], []  # a line of each version before a second one of any
    for version in filter(differing.__contains__, by_version):
        lines: dict[str, list[int]] = {}
        for post in by_version[version]:
            lines.setdefault(post.line, []).append(post.rank)
        first_line, *others_lines = [f"  {named(ranks)}: {line}" for line, ranks in lines.items()]
        firsts.append(first_line)
        more += others_lines
    head = f"ranks differ in {post.name}; up to there they were alike: [TCS-order-differs]"
    rule = _members_rule(of_rank.values())
    return "\n".join([head, *(firsts + more)[:_NAMED_AT_MOST], *_and_more(firsts + more), *rule])


def _members_rule(posts: Collection[Post], absent: Iterable[int] = ()) -> list[str]:
    """The rule that a program breaks whose posts of one creation, and absent ranks, look like that."""
    made = {post.rank: post.ranks for post in posts if post.kind == COLLECTIVE}
    return [members.RULE] if members.alone(made, absent) else []


def _circle(links: Sequence[Post]) -> str:
    """The last rank waits for the first one, each other for the next."""
    lines = [
        f"  rank {post.rank} waits for rank {awaited.rank}: {post.line}"
        for post, awaited in zip(links, [*links[1:], links[0]])
    ]
    return "\n".join(["ranks wait for each other, so none of them can go on: [TCS-order-circle]", *lines])


def _and_more(items: Sequence[object]) -> list[str]:
    return [f"  and {len(items) - _NAMED_AT_MOST} more"] if len(items) > _NAMED_AT_MOST else []


def _verdict(text: str, *, is_error: bool) -> str:
    return json.dumps({"text": text, "is_error": is_error})
