# SPDX-License-Identifier: Apache-2.0
"""The documentation as a site: it builds without a warning, and who pastes what hangs finds the page."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

import torchcommshim
from torchcommshim import settings
from torchcommshim.repair.defects import CATALOGUE
from torchcommshim.repair.traits import Traits
from torchcommshim.tell.report import Report

pytestmark = pytest.mark.once

DOCS = ROOT / "docs"
CODE = re.compile(r"\bTCS-[a-z]+(?:-[a-z]+)*")
PAGES = {
    **{f"TCS-{page.stem}": page for page in (DOCS / "defects").glob("*.md")},
    **{page.stem: page for page in (DOCS / "messages").glob("TCS-*.md")},
}
SOURCES = [
    path
    for path in Path(torchcommshim.__file__).parent.rglob("*.py")
    if not {"explain", "verify"} & set(path.parts)  # what these commands print has no codes
]
# What gives a text to people while a job runs.
TELLING = {"say", "AgreementError", "OrderError"}
SECTIONS_OF_A_DEFECT = [
    "What you see",
    "Which torch",
    "Who is known to meet it",
    "How to be sure",
    "What helps",
    "Upstream",
    "For maintainers",
]


def sections(page):
    return re.findall(r"^## (.*)$", page.read_text(), re.MULTILINE)


# -- the site's own search -----------------------------------------------------------------------------------

# A browser's search worker has these; everything else in it is the site's own.
WORKER = """
var self = globalThis, heard, said = [];
var console = {warn: text => { throw Error(text) }, log() {}, error() {}};
function addEventListener(name, listener) { heard = listener }
function postMessage(message) { said.push(message) }
"""


class Search:
    """The search of a built site: its scripts and its index, in a JavaScript engine."""

    def __init__(self, site):
        self._engine = pytest.importorskip("py_mini_racer").MiniRacer()
        (worker,) = (site / "assets" / "javascripts" / "workers").glob("search*.js")
        for script in (WORKER, worker.read_text(), (site / "pasted.js").read_text()):
            self._engine.eval(script + "\n;0")
        index = json.loads((site / "search" / "search_index.json").read_text())
        self._send({"type": 0, "data": {**index, "options": {"suggest": False}}})

    def paste(self, text):
        """The pages that are found for a pasted text, best first."""
        words = self._engine.eval(f"pastedWords({json.dumps(text)})")
        found = self._send({"type": 2, "data": words})["data"]["items"]
        return [page[0]["location"].split("#")[0].rstrip("/") for page in found]

    def _send(self, message):
        self._engine.eval(f"said.length = 0; heard({{data: {json.dumps(message)}}}); 0")
        return json.loads(self._engine.eval("JSON.stringify(said)"))[0]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site; a warning is an error."""
    pytest.importorskip("material", reason="mkdocs-material is not installed")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment)
    assert built.returncode == 0, built.stderr
    return folder


@pytest.fixture(scope="module")
def search(site):
    return Search(site)


PASTED = {
    # A stack of py-spy, of the report on pytorch#134314.
    "defects/late-members": """
Thread 3263 (idle): "MainThread"
    perform_nocolor_split (torch/distributed/distributed_c10d.py:1535)
    _new_process_group_helper (torch/distributed/distributed_c10d.py:1535)
    _new_group_with_tag (torch/distributed/distributed_c10d.py:4205)
    new_group (torch/distributed/distributed_c10d.py:4125)
    initialize_model_parallel (megatron/core/parallel_state.py:547)
""",
    # The last lines of a log, as in NVIDIA-NeMo/Speech#14399.
    "messages/TCS-rank-missing": """
[rank1]:   File "/usr/local/lib/python3.12/torch/distributed/distributed_c10d.py", line 2780, in broadcast
[rank1]:     work = group.broadcast([tensor], opts)
[rank1]: torch.distributed.DistBackendError: [1] is setting up NCCL communicator and retrieving ncclUniqueId
from [0] via c10d key-value store by key '0', but store->get('0') got error: wait timeout after 600000ms,
keys: /default_pg/0//cuda//0
[rank1]: Exception raised from doWait at /opt/pytorch/torch/csrc/distributed/c10d/TCPStore.cpp:578
""",
    # A message of torchcommshim.
    "messages/TCS-hang-report": """
torchcommshim 0.1.0: hang report: 2 of 3 ranks wait in a creation, for 120 s by now
  ranks 0,2  waiting for 120 s in ProcessGroupGloo: #1 new_group [0-2] gloo at alone.py:4 <module>
""",
    "defects/direct-helper": """
    commGetSplitInfo (init.cc:1741)
    ncclCommSplit (libnccl.so.2)
    broadcast (torch/distributed/distributed_c10d.py:2714)
    init_custom_process_group (sglang/srt/utils/common.py:1210)
""",
    "defects/local-split": """
  File "/venv/lib/torch/distributed/distributed_c10d.py", line 2112, in _new_process_group_helper
    eager_backend.eager_connect_single_device(device_id)
""",
    "defects/no-device-backend": "RuntimeError: No backend type associated with device type cuda",
    "defects/world-cannot-split": (
        "AttributeError: 'torch._C._distributed_c10d.ProcessGroupGloo' object has no attribute "
        "'perform_nocolor_split'. Did you mean: 'supports_splitting'?"
    ),
    "messages/TCS-order-differs": "torchcommshim.tell.order.OrderError: ranks differ in call 2 of new_group",
}


@pytest.mark.parametrize("page", PASTED)
def test_pasted_text_leads_to_its_page(search, page):
    """The first result for what people paste is the page that helps them."""
    assert search.paste(PASTED[page])[0] == page


@pytest.mark.parametrize("code", sorted(PAGES))
def test_code_leads_to_its_page(search, code):
    """The first result for a message's code is its page."""
    expected = str(PAGES[code].relative_to(DOCS).with_suffix(""))
    assert search.paste(f"[{code}]")[0] == expected


# -- every message and every defect has its page -----------------------------------------------------------


def test_every_defect_has_its_page():
    """The catalogue's defects and the pages in docs/defects are the same."""
    assert {page.stem for page in (DOCS / "defects").glob("*.md")} == {defect.name for defect in CATALOGUE}


@pytest.mark.parametrize("defect", CATALOGUE, ids=lambda defect: defect.name)
def test_page_of_a_defect(defect):
    """It has all its sections, in one order, and names the upstream report of the catalogue."""
    page = PAGES[f"TCS-{defect.name}"]
    assert sections(page) == SECTIONS_OF_A_DEFECT
    assert defect.upstream in page.read_text()


def test_every_code_has_its_page():
    """The codes in the package's messages and the pages are the same."""
    printed = {code for path in SOURCES for code in CODE.findall(path.read_text())}
    repaired = {"TCS-strip", *(f"TCS-{defect.name}" for defect in CATALOGUE)}

    assert printed | repaired == PAGES.keys()


def literal(argument):
    """The text that stands in an expression, empty if it only hands on what was made elsewhere."""
    parts = (each.value for each in ast.walk(argument) if isinstance(each, ast.Constant))
    return "".join(part for part in parts if isinstance(part, str) and " " in part)


def told(path):
    """Each text that a file gives to people: its line, and what of it stands there."""
    for call in ast.walk(ast.parse(path.read_text())):
        if isinstance(call, ast.Call):
            name = getattr(call.func, "attr", getattr(call.func, "id", ""))
            if name in TELLING and call.args and literal(call.args[0]):
                yield call.lineno, literal(call.args[0])


@pytest.mark.parametrize("path", [path for path in SOURCES if list(told(path))], ids=lambda path: path.stem)
def test_every_message_has_a_code(path):
    """A text that is said, or raised for the user, has a code where it is written."""
    assert [(line, text) for line, text in told(path) if "[TCS-" not in text] == []


@pytest.mark.parametrize("name", ["strip", *(defect.name for defect in CATALOGUE)])
def test_repair_line_has_the_code(capsys, name):
    """The line that says what was repaired ends with the code of the defect."""
    Report(settings.Settings(), Traits(), "2.4.1").repaired([name], lambda: "so it is.", speak=True)

    assert capsys.readouterr().err == f"torchcommshim {torchcommshim.__version__}: so it is. [TCS-{name}]\n"


def test_list_of_messages_is_complete():
    """docs/messages/index.md links every page of a code, and no other."""
    index = DOCS / "messages" / "index.md"
    linked = re.findall(r"^\| \[(TCS-[\w-]+)\]\(([^)]+)\)", index.read_text(), re.MULTILINE)

    assert {code: (index.parent / target).resolve() for code, target in linked} == PAGES


@pytest.mark.parametrize("code", sorted(PAGES))
def test_page_begins_with_its_code(code):
    """The title, and the first of the tags that the search goes by, is the code."""
    text = PAGES[code].read_text()
    assert re.search(rf"^# {code}: ", text, re.MULTILINE)
    assert text.startswith(f'---\ntags:\n  - "{code}"\n')


def test_navigation_names_every_page():
    """mkdocs.yml lists each page of a code, so none is reached by search alone."""
    named = set(re.findall(r"^ +- (?:.*: )?(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert {str(page.relative_to(DOCS)) for page in PAGES.values()} <= named


def test_pictures_are_what_the_documents_say():
    """The terminal pictures are drawn from the measured table and from the report in docs/hangs.md."""
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        from draw_pictures import PICTURES
    finally:
        sys.path.pop(0)
    drawn = {name: drawing() for name, drawing in PICTURES.items()}
    kept = {name: Path(DOCS / "pictures" / name).read_text() for name in drawn}
    assert kept == drawn, "run python scripts/draw_pictures.py"
