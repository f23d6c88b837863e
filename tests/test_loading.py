# SPDX-License-Identifier: Apache-2.0
"""Getting loaded: in every Python process that may use torch, at the least cost, breaking none."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ARMED_BY, PTH, ROOT, Venv, interpreters, make_venv, run

import torchcommshim

pytestmark = pytest.mark.once

FINDERS = "[type(finder).__name__ for finder in sys.meta_path].count('_Tripwire')"

# Run by a sitecustomize of the user's; what it leaves in `sys` shows that, and when, it ran.
USERS = "import sys; sys.users_saw = 'torchcommshim' in sys.modules\n"


@pytest.fixture(scope="module")
def without(tmp_path_factory):
    """A virtual environment without the package."""
    return make_venv(tmp_path_factory.mktemp("without") / "venv")


@pytest.fixture(scope="module")
def folder(installed):
    """The folder of the installation that is meant for PYTHONPATH."""
    return installed.site_packages / "torchcommshim" / "sitecustomize"


def modules_at_start(venv):
    """The modules that Python imports before `-c pass` runs, as `-X importtime` names them."""
    report = venv.run("-X", "importtime", "-c", "pass").stderr
    return {line.split("|")[-1].strip() for line in report.splitlines()}


def stub_torch(where, body=""):
    """A package that imports as torch does, submodules first, for tests of the import hook alone."""
    package = where / "torch" / "distributed"
    package.mkdir(parents=True)
    (where / "torch" / "__init__.py").write_text("import torch.distributed\n")
    (package / "__init__.py").write_text("import torch.distributed.distributed_c10d\n")
    (package / "distributed_c10d.py").write_text(body)
    (where / "torch" / "version.py").write_text("__version__ = '2.2.2'\n")
    return where


# -- through the .pth -----------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [(), ("-s",), ("-E",), ("-I",), ("-u", "-O"), ("-W", "error")])
def test_armed(installed, flags):
    """Every way of starting Python that reads site-packages arms the shim."""
    assert installed.evaluate(ARMED_BY, *flags) == PTH


def test_not_armed_without_site(installed):
    """`-S` skips site-packages, so nothing is armed and nothing fails."""
    assert installed.evaluate(ARMED_BY, "-S") == []


def test_double_run_arms_once(installed):
    """A `.pth` runs twice in a virtual environment before Python 3.15; one finder is installed."""
    again = "[sys.modules['torchcommshim'].arm() for _ in range(3)]"

    assert installed.evaluate(FINDERS) == 1
    assert installed.evaluate(f"({again}, {FINDERS})[1]") == 1


@pytest.mark.parametrize("value", ["off", "0", "False", " NO "])
def test_master_switch(installed, value):
    """TORCHCOMMSHIM=off arms nothing: no finder, no line."""
    started = installed.run("-c", f"import sys; print({FINDERS}, {ARMED_BY})", TORCHCOMMSHIM=value)

    assert (started.stdout, started.stderr) == ("0 []\n", "")


def test_silent_start(installed):
    """A Python process that does not use torch.distributed gets no line of ours, whatever the settings."""
    for value in ("", "auto", "no such strategy"):
        started = installed.run("-c", "pass", TORCHCOMMSHIM=value)

        assert (started.stdout, started.stderr) == ("", "")


def test_start_imports_two_modules(installed, without):
    """`python -c pass` imports one module more than without us: `torchcommshim`."""
    ours = {"torchcommshim"}

    assert modules_at_start(installed) - modules_at_start(without) == ours


def test_looking_for_torch_imports_nothing(installed, tmp_path):
    """`find_spec("torch")`, how libraries test for torch, imports neither wrapt nor packaging."""
    looked = (
        "import importlib.util, sys; print(importlib.util.find_spec('torch') is not None,"
        " [name for name in sys.modules if name.split('.')[0] in ('wrapt', 'packaging', 'torch')])"
    )

    assert installed.run("-c", looked).stdout == "False []\n"
    assert installed.run("-c", looked, PYTHONPATH=stub_torch(tmp_path)).stdout == "True []\n"


def test_torch_absent(installed):
    """Without torch, `import torch` fails as it always did, and so does a submodule."""
    for name in ("torch", "torch.distributed"):
        failed = installed.run("-c", f"import {name}", check=False)

        assert failed.stderr.splitlines()[-1] == "ModuleNotFoundError: No module named 'torch'"


def test_importing_torch_imports_wrapt(installed, tmp_path):
    """`import torch` is when wrapt is imported, and not before."""
    imported = installed.run(
        "-c",
        "import sys; print('wrapt' in sys.modules); import torch; print('wrapt' in sys.modules)",
        PYTHONPATH=stub_torch(tmp_path),
    )

    assert imported.stdout == "False\nTrue\n"


def test_hook_that_raises(installed, tmp_path):
    """If wrapt is broken, `import torch` works, and one line on stderr says that the shim is inactive."""
    (stub_torch(tmp_path) / "wrapt.py").write_text("raise RuntimeError('broken wrapt')")

    imported = installed.run("-c", "import torch; print('imported')", PYTHONPATH=tmp_path)

    assert imported.stdout == "imported\n"
    assert imported.stderr == (
        f"torchcommshim {torchcommshim.__version__}: inactive, torch is left as it is: "
        "RuntimeError('broken wrapt') [TCS-inactive]\n"
    )


def test_torch_that_is_not_known(installed, tmp_path):
    """A torch without the functions that the shim wraps imports as it is; the shim stands aside."""
    status = "import json, torch, torchcommshim; print(json.dumps(torchcommshim.status()))"
    imported = installed.run("-c", status, PYTHONPATH=stub_torch(tmp_path))

    assert json.loads(imported.stdout)["standing_aside"] != []


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_multiprocessing(installed, tmp_path, method):
    """Children of every start method are armed."""
    script = tmp_path / "children.py"
    script.write_text(
        "import multiprocessing, sys\n"
        f"def child(queue): queue.put({ARMED_BY})\n"
        "if __name__ == '__main__':\n"
        f"    context = multiprocessing.get_context({method!r})\n"
        "    queue = context.Queue()\n"
        "    process = context.Process(target=child, args=(queue,))\n"
        "    process.start(); print(repr(queue.get())); process.join()\n"
    )

    assert installed.run(script).stdout == f"{PTH}\n"


def test_empty_environment(installed):
    """A child that is started with an empty environment is armed."""
    child = subprocess.run(
        [installed.python, "-c", f"import sys; print({ARMED_BY})"],
        env={},
        capture_output=True,
        text=True,
        check=True,
    )

    assert child.stdout == f"{PTH}\n"


@pytest.mark.parametrize("place", ["PYTHONPATH", "site-packages"])
def test_shadowing_sitecustomize(installed, wheel, tmp_path, place):
    """Somebody else's sitecustomize, wherever it lies, runs, and does not keep the `.pth` from arming."""
    if place == "PYTHONPATH":
        (tmp_path / "sitecustomize.py").write_text(USERS)
        venv, environment = installed, {"PYTHONPATH": tmp_path}
    else:
        venv, environment = make_venv(tmp_path / "venv"), {}
        venv.pip("install", "--quiet", "--no-deps", wheel)
        (venv.site_packages / "sitecustomize.py").write_text(USERS)

    assert venv.evaluate(f"({ARMED_BY}, sys.users_saw)", **environment) == (PTH, True)


@pytest.mark.parametrize(
    ("package", "command"),
    [("ddtrace", "ddtrace-run"), ("opentelemetry-distro", "opentelemetry-instrument")],
)
def test_under_other_launchers(wheel, tmp_path, package, command):
    """Launchers that bring a sitecustomize of their own leave the shim armed by its `.pth`."""
    venv = make_venv(tmp_path / "venv")
    venv.pip("install", "--quiet", wheel, package)
    loaded = f"[name for name in ('ddtrace', 'opentelemetry') if name in sys.modules], {ARMED_BY}"

    started = run(
        *(venv.path / "bin" / command, venv.python, "-c", f"import sys; print({loaded})"),
        PATH=f"{venv.path / 'bin'}:/usr/bin:/bin",
        DD_INSTRUMENTATION_TELEMETRY_ENABLED="false",
    )

    assert started.stdout == f"{[package.partition('-')[0]]} {PTH}\n"


# -- through the folder on PYTHONPATH -------------------------------------------------------------


def armed_by_folder(folder):
    return [str(folder / "sitecustomize.py")]


def test_folder_arms_a_venv_without_the_package(without, folder):
    """With the folder on PYTHONPATH, a virtual environment that lacks the package is armed."""
    assert without.evaluate(ARMED_BY, PYTHONPATH=folder) == armed_by_folder(folder)


def test_folder_through_a_link(without, folder, tmp_path):
    """A symbolic link to the folder serves as well: images keep one in a place that is easy to name."""
    link = tmp_path / "shim"
    link.symlink_to(folder)

    assert without.evaluate(ARMED_BY, PYTHONPATH=link) == armed_by_folder(folder)


def test_folder_of_a_checkout(without, tmp_path):
    """The folder of a source checkout arms with the checkout's package, whatever the checkout is called."""
    checkout = tmp_path / "torchcommshim"
    for name in ("sitecustomize", "torchcommshim"):
        shutil.copytree(ROOT / name, checkout / name)

    expected = armed_by_folder(checkout / "sitecustomize")
    assert without.evaluate(ARMED_BY, PYTHONPATH=checkout / "sitecustomize") == expected


def test_folder_beside_the_pth(installed, folder):
    """With both, both arm, and one finder is installed."""
    both = sorted([*PTH, *armed_by_folder(folder)])

    assert installed.evaluate(f"({ARMED_BY}, {FINDERS})", PYTHONPATH=folder) == (both, 1)


def test_folder_and_the_switches_of_python(without, folder):
    """-E, -I and -S ignore PYTHONPATH or site; nothing is armed and nothing fails."""
    for flag in ("-E", "-I", "-S"):
        assert without.evaluate(ARMED_BY, flag, PYTHONPATH=folder) == []


def test_folder_imports_nothing_else_at_start(without, folder, tmp_path):
    """Of modules, the folder adds the package's two and `sitecustomize` itself."""
    venv = make_venv(tmp_path / "venv")
    before = modules_at_start(venv)
    report = venv.run("-X", "importtime", "-c", "pass", PYTHONPATH=folder).stderr
    after = {line.split("|")[-1].strip() for line in report.splitlines()}

    assert after - before - {"sitecustomize"} == {"torchcommshim"}


def test_folder_lends_three_packages_only(without, installed, folder):
    """The environment gets wrapt and packaging from beside the folder, and nothing else from there."""
    neighbour = installed.site_packages / "neighbour.py"
    neighbour.write_text("")
    found = (
        "[__import__('importlib.util').util.find_spec(name) is not None"
        " for name in ('wrapt', 'packaging', 'neighbour')]"
    )

    try:
        assert without.evaluate(found, PYTHONPATH=folder) == [True, True, False]
        assert (
            without.evaluate(
                "any('installed' in entry and 'sitecustomize' not in entry for entry in sys.path)",
                PYTHONPATH=folder,
            )
            is False
        )
    finally:
        neighbour.unlink()


def test_folder_lends_what_the_hook_needs(without, folder, tmp_path):
    """In an environment without wrapt, the import hook works with the wrapt from beside the folder."""
    torch = stub_torch(tmp_path)
    imported = without.run("-c", "import torch, wrapt; print(wrapt.__file__)", PYTHONPATH=f"{folder}:{torch}")

    assert Path(imported.stdout.strip()).parent.parent == folder.parent.parent


def test_environments_own_packages_win(folder, tmp_path):
    """An environment's own wrapt is used, not the one from beside the folder."""
    venv = make_venv(tmp_path / "venv")
    venv.pip("install", "--quiet", "wrapt==1.17.3")

    assert venv.evaluate("__import__('wrapt').__version__", PYTHONPATH=folder) == "1.17.3"


def test_folder_runs_users_sitecustomize_first(without, folder, tmp_path):
    """The sitecustomize behind ours runs first, stays `sys.modules['sitecustomize']`, and we arm."""
    users = tmp_path / "sitecustomize.py"
    users.write_text(USERS)
    seen = f"(sys.users_saw, sys.modules['sitecustomize'].__file__, {ARMED_BY})"

    expected = (False, str(users), armed_by_folder(folder))
    assert without.evaluate(seen, PYTHONPATH=f"{folder}:{tmp_path}") == expected


def test_folder_behind_users_sitecustomize(without, folder, tmp_path):
    """A user's sitecustomize before ours hides ours, as Python has it: we do not fight it."""
    (tmp_path / "sitecustomize.py").write_text(USERS)

    assert without.evaluate(ARMED_BY, PYTHONPATH=f"{tmp_path}:{folder}") == []


@pytest.mark.parametrize(
    "users", ["raise ValueError('mine')", "import no_such_module", "import sys; sys.exit(3)", "1/"]
)
def test_users_sitecustomize_that_fails(without, folder, tmp_path, users):
    """A user's sitecustomize that fails has the same exit code and message as without us."""
    (tmp_path / "sitecustomize.py").write_text(users)
    code = ("-c", "pass")

    plain = without.run(*code, check=False, PYTHONPATH=tmp_path)
    chained = without.run(*code, check=False, PYTHONPATH=f"{folder}:{tmp_path}")

    # Python ends a start that SystemExit broke with a traceback, in which our frames may appear.
    last = slice(-1, None) if plain.returncode else slice(None)
    assert chained.returncode == plain.returncode
    assert chained.stderr.splitlines()[last] == plain.stderr.splitlines()[last]


def test_users_sitecustomize_that_fails_does_not_disarm(without, folder, tmp_path):
    """After a user's sitecustomize has failed, the shim is armed all the same."""
    (tmp_path / "sitecustomize.py").write_text("raise ValueError('mine')")

    armed = without.evaluate(ARMED_BY, PYTHONPATH=f"{folder}:{tmp_path}")
    assert armed == armed_by_folder(folder)


def test_folder_stays_on_the_path(without, folder, tmp_path):
    """sys.path is as Python made it, with what the user's sitecustomize added: children may be given it."""
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.path.append('/added')")

    path = without.evaluate("sys.path[1:3] + sys.path[-1:]", PYTHONPATH=f"{folder}:{tmp_path}")
    assert path == [str(folder), str(tmp_path), "/added"]


def test_folder_twice(without, folder, tmp_path):
    """The folder under two names on PYTHONPATH, as nested launchers leave it, still chains to the user's."""
    (tmp_path / "link").symlink_to(folder)
    (tmp_path / "sitecustomize.py").write_text(USERS)
    path = f"{folder}:{tmp_path / 'link'}:{tmp_path}"

    seen = without.evaluate(f"(sys.users_saw, {ARMED_BY}, {FINDERS})", PYTHONPATH=path)
    assert seen == (False, armed_by_folder(folder), 1)


def test_children_inherit_the_folder(without, folder):
    """A child process of a Python with the folder on PYTHONPATH is armed."""
    child = "__import__('subprocess').check_output([sys.executable, '-c', {!r}], text=True)"
    program = f"import sys; print({ARMED_BY})"

    inherited = without.evaluate(child.format(program), PYTHONPATH=folder)
    assert inherited == f"{armed_by_folder(folder)}\n"


def test_target_installation(wheel, without, tmp_path):
    """`pip install --target D` is armed by D's folder on PYTHONPATH; D alone has no `.pth` that runs."""
    without.pip("install", "--quiet", "--target", tmp_path / "target", wheel)
    folder = tmp_path / "target" / "torchcommshim" / "sitecustomize"

    assert without.evaluate(ARMED_BY, PYTHONPATH=tmp_path / "target") == []
    assert without.evaluate(ARMED_BY, PYTHONPATH=folder) == armed_by_folder(folder)


def test_run_command(installed, without, folder):
    """`torchcommshim run -- COMMAND` arms a Python of another environment."""
    command = (installed.path / "bin" / "torchcommshim", "run", "--", without.python)
    started = run(*command, "-c", f"import sys; print({ARMED_BY})")

    assert started.stdout == f"{armed_by_folder(folder)}\n"


# -- other Pythons --------------------------------------------------------------------------------


INTERPRETERS = interpreters()


@pytest.mark.parametrize("release", [release for release in INTERPRETERS if release >= (3, 9)], ids=str)
def test_other_python_releases(wheel, folder, tmp_path, release):
    """The one wheel, and the one folder of another release's installation, arm each supported Python."""
    run(INTERPRETERS[release], "-m", "venv", tmp_path / "venv")  # its own pip: a newer one may refuse it
    venv = Venv(tmp_path / "venv")
    by_folder = venv.evaluate(ARMED_BY, PYTHONPATH=folder)
    wrapt = venv.evaluate("__import__('wrapt').FunctionWrapper.__name__", PYTHONPATH=folder)
    venv.run("-m", "pip", "install", "--quiet", wheel)

    assert by_folder == armed_by_folder(folder)
    assert wrapt == "FunctionWrapper"
    assert venv.evaluate(ARMED_BY) == PTH


@pytest.mark.parametrize("release", [(3, 6), (3, 7), (3, 8)], ids=str)
def test_python_before_3_9(folder, tmp_path, release):
    """A Python that the package does not support runs the user's file behind the folder, and no more."""
    python = INTERPRETERS.get(release)
    if python is None:
        pytest.skip("no such Python here")
    (tmp_path / "sitecustomize.py").write_text(USERS)

    started = run(
        python, "-c", f"import sys; print(sys.users_saw, {ARMED_BY})", PYTHONPATH=f"{folder}:{tmp_path}"
    )

    assert (started.stdout, started.stderr) == ("False []\n", "")


def test_package_in_two_environments(wheel, folder, tmp_path):
    """An environment's own torchcommshim is used, not the one that the folder belongs to."""
    venv = make_venv(tmp_path / "venv")
    venv.pip("install", "--quiet", "--no-deps", wheel)

    used = venv.evaluate("sys.modules['torchcommshim'].__file__", PYTHONPATH=folder)
    assert used == str(venv.site_packages / "torchcommshim" / "__init__.py")


def test_interpreter_of_this_run():
    """The environment that runs the tests has the shim installed, and was armed by it."""
    assert set(sys.modules["torchcommshim"]._armed_by) >= set(PTH)
