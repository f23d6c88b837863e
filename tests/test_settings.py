# SPDX-License-Identifier: Apache-2.0
"""The environment variables: what is accepted, what is the default, what a mistake costs."""

from __future__ import annotations

import re

import pytest
from conftest import ROOT

import torchcommshim
from torchcommshim import settings
from torchcommshim.settings import Settings

pytestmark = pytest.mark.once


def test_defaults():
    """An empty environment means auto and error, no check, no trace, and a hang report after 120 s."""
    assert settings.read({}) == Settings(
        strategy="auto", agreement="error", check_order=False, hang_report_s=120.0, trace="", warnings=()
    )


@pytest.mark.parametrize("strategy", settings.STRATEGIES)
def test_each_strategy(strategy):
    """Each documented strategy is accepted without a warning."""
    assert settings.read({"TORCHCOMMSHIM": strategy}) == Settings(strategy=strategy)


@pytest.mark.parametrize("agreement", settings.AGREEMENTS)
def test_each_agreement(agreement):
    """Each documented value of TORCHCOMMSHIM_AGREEMENT is accepted without a warning."""
    assert settings.read({"TORCHCOMMSHIM_AGREEMENT": agreement}) == Settings(agreement=agreement)


@pytest.mark.parametrize("word", settings.ON)
def test_words_for_true(word):
    """The usual words for true mean the default of either variable."""
    assert settings.read({"TORCHCOMMSHIM": word, "TORCHCOMMSHIM_AGREEMENT": word}) == Settings()


@pytest.mark.parametrize("word", settings.OFF)
def test_words_for_false(word):
    """The usual words for false mean off, of either variable."""
    environment = {"TORCHCOMMSHIM": word, "TORCHCOMMSHIM_AGREEMENT": word}

    assert settings.read(environment) == Settings(strategy="off", agreement="off")


@pytest.mark.parametrize("word", settings.ON)
def test_check_order_on(word):
    """The usual words for true turn the check of the order on; it is off otherwise."""
    assert settings.read({"TORCHCOMMSHIM_CHECK_ORDER": word}) == Settings(check_order=True)


@pytest.mark.parametrize("word", settings.OFF)
def test_words_for_false_among_the_watchers(word):
    """The usual words for false turn the check and the hang report off."""
    environment = {"TORCHCOMMSHIM_CHECK_ORDER": word, "TORCHCOMMSHIM_HANG_REPORT_S": word}

    assert settings.read(environment) == Settings(check_order=False, hang_report_s=0.0)


@pytest.mark.parametrize(("text", "seconds"), [("30", 30.0), (" 0.5 ", 0.5), ("1e3", 1000.0), ("", 120.0)])
def test_hang_report_seconds(text, seconds):
    """TORCHCOMMSHIM_HANG_REPORT_S is a number of seconds."""
    assert settings.read({"TORCHCOMMSHIM_HANG_REPORT_S": text}) == Settings(hang_report_s=seconds)


@pytest.mark.parametrize("text", ["-1", "nan", "inf", "soon", "30s"])
def test_hang_report_nonsense(text):
    """Anything else costs one warning, and the default is kept."""
    read = settings.read({"TORCHCOMMSHIM_HANG_REPORT_S": text})
    warning = f"TORCHCOMMSHIM_HANG_REPORT_S={text!r} is not known; accepted: seconds, 0 for never. Using 120."

    assert read == Settings(warnings=(warning,))


def test_trace_folder():
    """TORCHCOMMSHIM_TRACE is a folder, spelled as the user spelled it."""
    assert settings.read({"TORCHCOMMSHIM_TRACE": " Traces/of job "}) == Settings(trace="Traces/of job")


@pytest.mark.parametrize("value", ["", "   "])
def test_empty_value(value):
    """An empty value is an unset one."""
    assert settings.read({"TORCHCOMMSHIM": value, "TORCHCOMMSHIM_AGREEMENT": value}) == Settings()


@pytest.mark.parametrize("value", ["STRIP", " strip ", "Strip\n"])
def test_case_and_space(value):
    """Case and surrounding space do not matter."""
    assert settings.read({"TORCHCOMMSHIM": value}) == Settings(strategy="strip")


def test_unknown_strategy():
    """An unknown strategy costs one warning that shows it and lists what is accepted; auto is used."""
    read = settings.read({"TORCHCOMMSHIM": "Stripp"})

    assert read == Settings(
        warnings=(
            "TORCHCOMMSHIM='Stripp' is not known; accepted: auto, strip, split, observe, off. Using 'auto'.",
        )
    )


def test_unknown_agreement():
    """An unknown agreement likewise; `strip`, a strategy, is not one."""
    read = settings.read({"TORCHCOMMSHIM_AGREEMENT": "strip"})

    assert read == Settings(
        warnings=("TORCHCOMMSHIM_AGREEMENT='strip' is not known; accepted: error, warn, off. Using 'error'.",)
    )


def test_one_mistake_does_not_cost_the_other_setting():
    """A mistake in one variable leaves the other as the user set it."""
    read = settings.read({"TORCHCOMMSHIM": "split", "TORCHCOMMSHIM_AGREEMENT": "loud"})

    assert (read.strategy, read.agreement, len(read.warnings)) == ("split", "error", 1)


def test_unknown_variables():
    """Variables that look like ours get one warning each, in order; others none."""
    environment = {"TORCHCOMMSHIM_STRATEGY": "strip", "TORCHCOMMSHIMS": "1", "TORCH_COMM": "1", "PATH": "/"}
    accepted = f"accepted: {', '.join(settings.VARIABLES)}. It is ignored."

    assert settings.unknown(environment) == ["TORCHCOMMSHIMS", "TORCHCOMMSHIM_STRATEGY"]
    assert settings.read(environment).warnings == (
        f"TORCHCOMMSHIMS is not a variable of torchcommshim; {accepted}",
        f"TORCHCOMMSHIM_STRATEGY is not a variable of torchcommshim; {accepted}",
    )


def test_reading_changes_nothing():
    """Reading leaves the environment as it is."""
    environment = {"TORCHCOMMSHIM": "nonsense", "TORCHCOMMSHIM_X": ""}
    before = dict(environment)

    settings.read(environment)

    assert environment == before


def test_settings_are_frozen():
    """Settings cannot be changed after they were read: a decision may depend on them."""
    with pytest.raises(AttributeError):
        settings.read({}).strategy = "off"


def test_start_up_knows_the_same_words():
    """The package's __init__.py, which may not import settings.py, has a copy of the words for off."""
    assert torchcommshim._OFF == settings.OFF


@pytest.mark.parametrize("value", ["", "auto", "on", "observe", "nonsense", *settings.OFF, " OFF "])
def test_start_up_reads_the_master_switch_alike(value, monkeypatch):
    """The master switch at start and the strategy read later never contradict each other."""
    monkeypatch.setenv("TORCHCOMMSHIM", value)

    assert torchcommshim._is_off() == (settings.read({"TORCHCOMMSHIM": value}).strategy == "off")


def test_readme_lists_every_value():
    """The README's table of switches has each variable, with exactly the values that are accepted."""
    rows = dict(
        re.findall(r"^\| `(TORCHCOMMSHIM\w*)` \| ([^|]*) \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    )
    words = {name: tuple(re.findall(r"`(\w+)`", values)) for name, values in rows.items()}

    assert tuple(words) == settings.VARIABLES
    assert words["TORCHCOMMSHIM"] == settings.STRATEGIES
    assert words["TORCHCOMMSHIM_AGREEMENT"] == settings.AGREEMENTS
    assert words["TORCHCOMMSHIM_CHECK_ORDER"] == ("on", "off")
