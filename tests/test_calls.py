# SPDX-License-Identifier: Apache-2.0
"""What observers of creations are told."""

from __future__ import annotations

import pytest

from torchcommshim.repair.calls import Call, observed, site

pytestmark = pytest.mark.once

CALL = Call(3, "collective", (0, 1), "nccl", "5", rank=0, world_size=4, shared=True, site="train.py:7 main")


class Witness:
    """Writes down what it hears, and fails at the start if asked."""

    def __init__(self, name, heard, fails=False):
        self.name, self.heard, self.fails = name, heard, fails

    def begin(self, call, store):
        self.heard.append((self.name, "begin", call.number, store))
        if self.fails:
            raise ValueError(self.name)

    def end(self, call, error):
        self.heard.append((self.name, "end", call.number, error))


def make(heard, what):
    """Stands for torch's helper: makes a group, or fails."""
    if isinstance(what, Exception):
        raise what
    heard.append(what)
    return "group"


def test_observers_hear_of_both_ends():
    """Each observer hears of the begin, in order, and of the end, the last one first."""
    heard = []

    made = observed(
        [Witness("a", heard), Witness("b", heard)], CALL, "store", make, (heard,), {"what": "made"}
    )

    assert made == "group"
    assert heard == [
        ("a", "begin", 3, "store"),
        ("b", "begin", 3, "store"),
        "made",
        ("b", "end", 3, None),
        ("a", "end", 3, None),
    ]


def test_observers_hear_of_an_error():
    """What the creation raises reaches the caller, and each observer."""
    heard, error = [], RuntimeError("NCCL")

    with pytest.raises(RuntimeError) as raised:
        observed([Witness("a", heard)], CALL, None, make, (heard, error), {})

    assert raised.value is error
    assert heard[1:] == [("a", "end", 3, error)]


def test_an_observer_that_raises_stops_the_creation():
    """The group is not made; those who heard of its begin hear of its end, later ones of neither."""
    heard = []
    observers = [Witness("a", heard), Witness("b", heard, fails=True), Witness("c", heard)]

    with pytest.raises(ValueError, match="b") as raised:
        observed(observers, CALL, None, make, (heard, "made"), {})

    assert heard == [("a", "begin", 3, None), ("b", "begin", 3, None), ("a", "end", 3, raised.value)]


def test_site_is_the_caller_outside_torch():
    """Frames of torch and of ours are passed over."""
    space = {"__name__": "torch.distributed.inner", "site": site}
    exec(compile("def make(): return site()", "inner.py", "exec"), space)  # noqa: S102

    assert site().split(":")[0] == __file__
    assert space["make"]().endswith(" test_site_is_the_caller_outside_torch")
