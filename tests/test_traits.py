# SPDX-License-Identifier: Apache-2.0
"""The probes, against the sources of every torch release that has `device_id`; nothing of them is run."""

from __future__ import annotations

import types
from dataclasses import fields

import pytest
from fetch_torch_sources import RELEASES, newest, source

from torchcommshim.repair import traits

pytestmark = pytest.mark.once

LATE, IGNORES, SIZE = "members_split_late", "split_ignores_backend", "split_tests_size"
P2P, NAMES, PICKS = "point_to_point_splits", "local_names_differ", "device_picks_backend"
INT, NONBLOCKING, UNWAITED = "accepts_int_device", "nonblocking_by_default", "connects_without_waiting"
BARRIER = "barrier_asks_backend"
SPLIT_NAMES, PARENT, PARTS = "split_names_differ", "split_counts_parent", "split_counts_members"
ONE_BACKEND, SHARED = "split_wants_one_backend", "split_names_shared"

V23 = {LATE, IGNORES, SIZE}
V25 = {IGNORES, SIZE, P2P, BARRIER, PARENT, PARTS, SHARED}
V26 = {IGNORES, NAMES, PICKS}
V27 = {*V26, PARENT, PARTS, SHARED}
V29 = {*V26, INT, PARENT, SHARED}
V210 = {*V26, INT, SPLIT_NAMES}
V214 = V29 - {SHARED}
EXPECTED = {
    **dict.fromkeys(["2.3.0", "2.3.1", "2.4.0", "2.4.1"], V23),
    **dict.fromkeys(["2.5.0", "2.5.1"], V25),
    "2.6.0": {*V27, UNWAITED, BARRIER},
    "2.7.0": {*V27, UNWAITED, BARRIER, NONBLOCKING},
    "2.7.1": V27,
    "2.8.0": {*V27, INT, ONE_BACKEND},
    **dict.fromkeys(["2.9.0", "2.9.1"], V29),
    **dict.fromkeys(["2.10.0", "2.11.0", "2.12.0", "2.12.1", "2.13.0"], V210),
    **dict.fromkeys(["2.14.0", "2.14.1"], V214),
    "2.15.0": V214 - {IGNORES},
}


def probe(text, version):
    """Probe a source text as if a torch of that version had been imported."""
    constants = compile(text, f"torch-{version}", "exec").co_consts
    code = {const.co_name: const for const in constants if isinstance(const, types.CodeType)}
    return traits.probe(code.get, version)


def holding(found):
    """The names of the traits that hold."""
    return {name for name, value in vars(found).items() if value is True}


def test_every_release_has_an_expectation():
    """The table below covers the releases that are fetched."""
    assert set(EXPECTED) == set(RELEASES)


@pytest.mark.parametrize("version", RELEASES)
def test_traits(version):
    """The traits that hold for one release are those of the table, and the release is served."""
    found = probe(source(version), version)

    assert (found.missing, holding(found)) == ((), EXPECTED[version])


def test_newest_release():
    """The newest torch on the package index, even one that is younger than this test, is served."""
    version = newest()

    assert probe(source(version), version).missing == ()


def test_vendor_build_before_a_release():
    """A vendor's pre-release of 2.4 (NGC 24.06) behaves as 2.4 does, and is found to."""
    found = probe(source("2.4.0"), "2.4.0a0+f70bd71a48")

    assert holding(found) == V23


def test_version_decides_only_what_is_compiled():
    """With a version that cannot be read, all traits but the compiled ones are still found."""
    found = probe(source("2.4.1"), "main-nightly")

    assert holding(found) == {LATE, IGNORES}


def test_found_says_how():
    """Each trait says how it was found, for `doctor`."""
    found = probe(source("2.7.0"), "2.7.0").found

    assert set(found) == {field.name for field in fields(traits.Traits)} - {"missing", "found"}
    assert found[NONBLOCKING] == "torch 2.7.0, this is 2.7.0"


@pytest.mark.parametrize("name", traits.WRAPPED)
def test_function_that_is_gone(name):
    """A build without a function that the shim wraps is left alone, and the function is named."""
    text = source("2.13.0").replace(f"def {name}(", f"def not_{name}(")

    assert probe(text, "2.13.0") == traits.Traits(
        missing=(f"torch.distributed.distributed_c10d has no Python function {name}",)
    )


def test_torch_that_is_too_old():
    """A torch before 2.3 has no device_id, so nothing can split: left alone, with that reason."""
    text = (
        "def init_process_group(backend=None): _new_process_group_helper()\n"
        "def _new_process_group_helper(): pass\n"
        "def new_group(): pass\n"
        "def _new_group_with_tag(): pass\n"
        "def _process_group_name(): pass\n"
    )

    missing = probe(text, "2.2.2").missing
    assert "init_process_group takes no device_id, so nothing can split" in missing


def test_helper_that_no_longer_asks():
    """A torch whose helper does not ask `_get_split_source` is left alone: the remedy would do nothing."""
    text = source("2.13.0").replace("= _get_split_source(", "= _get_other_source(")

    missing = probe(text, "3.0").missing
    assert missing == ("_new_process_group_helper does not consult _get_split_source",)


def test_digest():
    """The digest that ranks compare names the traits that hold, in a fixed order."""
    assert probe(source("2.4.1"), "2.4.1").digest() == (
        "members_split_late+split_ignores_backend+split_tests_size"
    )
    assert traits.Traits().digest() == "none"
