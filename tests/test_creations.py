# SPDX-License-Identifier: Apache-2.0
"""Reading and replacing the arguments of a call, however the caller passed them."""

from __future__ import annotations

import pytest

from torchcommshim.repair.creations import CallForm, Creation

pytestmark = pytest.mark.once


def make(size, backend=None, *, device_id=None, **rest):
    """A function of several kinds of parameters."""


@pytest.mark.parametrize(
    ("args", "kwargs", "name", "expected"),
    [
        ((4, "nccl"), {}, "backend", "nccl"),
        ((4,), {"backend": "nccl"}, "backend", "nccl"),
        ((4,), {}, "backend", None),
        ((), {}, "size", None),
        ((4,), {"device_id": 0}, "device_id", 0),
        ((4,), {}, "a_parameter_of_another_release", None),
    ],
)
def test_get(args, kwargs, name, expected):
    """A value is found where it was passed; else it is the default; a parameter that is not there is None."""
    assert CallForm(make).get(args, kwargs, name) == expected


@pytest.mark.parametrize(
    ("args", "kwargs", "changes", "expected"),
    [
        ((4, "nccl"), {}, {"backend": "gloo"}, ((4, "gloo"), {})),
        ((4,), {"backend": "nccl"}, {"backend": "gloo"}, ((4,), {"backend": "gloo"})),
        ((4,), {}, {"device_id": 1}, ((4,), {"device_id": 1})),
        ((4,), {"unknown": 1}, {}, ((4,), {"unknown": 1})),
    ],
)
def test_replace(args, kwargs, changes, expected):
    """Positional arguments stay positional, keywords keywords, and what is not named stays as it was."""
    assert CallForm(make).replace(args, kwargs, **changes) == expected


def test_replace_leaves_the_callers_arguments():
    """The caller's own dictionary is not changed."""
    kwargs = {"backend": "nccl"}
    CallForm(make).replace((4,), kwargs, backend="gloo")

    assert kwargs == {"backend": "nccl"}


@pytest.mark.parametrize(
    ("ranks", "expected"), [((0, 1, 2, 3), True), ((3, 2, 1, 0), True), ((0, 1), False), ((), False)]
)
def test_spans_world(ranks, expected):
    """A group spans the world if it holds every rank, in any order; a group without known ranks does not."""
    assert Creation(kind="collective", ranks=ranks, backend="nccl", world_size=4).spans_world is expected
