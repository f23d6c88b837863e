# SPDX-License-Identifier: Apache-2.0
"""Living with others: packages that replace the same functions, other start-up hooks, torch.compile."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path

import pytest
from conftest import ARMED_BY, PTH, interpreters, pip, run

# A world of one rank, and another package's way with new_group: slime's, which puts the old one back.
PRELUDE = """
import json, os, sys
import torch, torch.distributed as dist

taken = []

def take():
    dist.old_new_group = dist.new_group

    def new_group(*args, **kwargs):
        taken.append(args)
        return dist.old_new_group(*args, **kwargs)

    dist.new_group = new_group

def give_back():
    dist.new_group = dist.old_new_group

def world():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

def groups():
    for local in (False, True):
        total = torch.ones(1)
        dist.all_reduce(total, group=dist.new_group([0], use_local_synchronization=local))
        assert total.item() == 1
"""


@pytest.fixture
def made(tmp_path):
    """Run a program with a trace; returns the kinds of the groups that the shim saw, and what it printed."""
    pytest.importorskip("torch", reason="needs torch")

    def run_program(program, **environment):
        trace = tmp_path / "trace"
        command = (sys.executable, "-c", PRELUDE + textwrap.dedent(program))
        done = run(*command, cwd=tmp_path, TORCHCOMMSHIM_TRACE=str(trace), **environment)
        assert "failed" not in done.stderr
        lines = "".join(path.read_text() for path in trace.iterdir()).splitlines()
        records = [json.loads(line) for line in lines]
        return [record["kind"] for record in records if record["record"] == "creation"], done.stdout

    return run_program


class TestAnotherPackageReplacesNewGroup:
    KINDS = ("collective", "local")

    def test_after_us(self, made):
        """Replaced and restored once the shim is there: it sees each group once, in all three times."""
        kinds, printed = made("world(); groups(); take(); groups(); give_back(); groups(); print(len(taken))")

        assert (kinds[1:], printed) == ([*self.KINDS] * 3, "2\n")

    def test_before_us(self, made):
        """Replaced before the shim is installed, restored after: the same."""
        program = """
            take()
            del os.environ["TORCHCOMMSHIM"]
            import torchcommshim
            torchcommshim.install()
            world(); groups(); give_back(); groups(); print(len(taken))
        """
        kinds, printed = made(program, TORCHCOMMSHIM="off")

        assert (kinds[1:], printed) == ([*self.KINDS] * 2, "2\n")

    def test_around_us(self, made):
        """Replaced before, the shim removed while theirs is in place, restored: nobody is left in between."""
        program = """
            original = dist.new_group
            take()
            del os.environ["TORCHCOMMSHIM"]
            import torchcommshim
            torchcommshim.install()
            world(); groups()
            torchcommshim.uninstall()
            groups(); give_back(); groups()
            print(len(taken), dist.new_group is original)
        """
        kinds, printed = made(program, TORCHCOMMSHIM="off")

        assert (kinds[1:], printed) == ([*self.KINDS], "4 True\n")


class TestStartUpHooks:
    def test_sitecustomize_that_imports_torch(self, made, tmp_path):
        """A vendor's sitecustomize that imports torch and replaces new_group itself: the shim sees all."""
        vendors = PRELUDE + "\ntake()\nsys.vendors = taken\n"
        (tmp_path / "sitecustomize.py").write_text(vendors)

        kinds, printed = made("world(); groups(); print(len(sys.vendors))", PYTHONPATH=str(tmp_path))

        assert (kinds[1:], printed) == (["collective", "local"], "2\n")

    def test_sitecustomize_with_an_import_hook(self, made, tmp_path):
        """Another finder in front of ours, and another hook on the same module: both work."""
        vendors = """
            import sys
            import wrapt

            class Finder:
                seen = []
                def find_spec(self, name, path=None, target=None):
                    self.seen.append(name)

            sys.vendors = Finder(), []
            sys.meta_path.insert(0, sys.vendors[0])
            wrapt.register_post_import_hook(sys.vendors[1].append, "torch.distributed.distributed_c10d")
        """
        (tmp_path / "sitecustomize.py").write_text(textwrap.dedent(vendors))
        program = """
            world(); groups()
            finder, modules = sys.vendors
            print("torch.distributed" in finder.seen, [module.__name__ for module in modules])
        """

        kinds, printed = made(program, PYTHONPATH=str(tmp_path))

        assert kinds[1:] == ["collective", "local"]
        assert printed == "True ['torch.distributed.distributed_c10d']\n"

    @pytest.mark.once
    def test_usercustomize(self, wheel, tmp_path):
        """Installed with --user, beside a usercustomize of the user's: it runs after us, and we are armed."""
        python = list(interpreters().values())[-1]  # a virtual environment has no user site
        user = {"PYTHONUSERBASE": str(tmp_path)}
        where = run(python, "-m", "site", "--user-site", check=False, **user).stdout.strip()
        pip(sys.executable, "install", "--quiet", "--no-deps", "--target", where, wheel)
        (Path(where) / "usercustomize.py").write_text(
            "import sys; sys.users_saw = 'torchcommshim' in sys.modules\n"
        )

        seen = run(python, "-c", f"import sys; print({ARMED_BY}, sys.users_saw)", **user).stdout

        assert seen == f"{PTH} True\n"


COMPILED = """
import json, sys
import torch, torch.distributed as dist

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
before = "torch._dynamo" in sys.modules

def step(x):
    y = x + 1
    first = dist.new_group([0])
    second = dist.new_group([0], use_local_synchronization=True)
    z = y * 2
    dist.all_reduce(z, group=first)
    dist.all_reduce(z, group=second)
    return z + 1

graphs = []

def backend(module, inputs):
    graphs.append([str(node.target) for node in module.graph.nodes])
    return module

compiled = torch.compile(step, backend=backend)
results = [compiled(torch.ones(2)).tolist() for _ in range(3)]
counters = torch._dynamo.utils.counters
breaks = sum(counters["graph_break"].values())
print(json.dumps([results, graphs, breaks, before, counters["frames"]["total"]]))
"""


def compiled(strategy):
    """Results, graphs and breaks of a compiled function that makes groups; the frames compiled; stderr."""
    done = run(sys.executable, "-c", COMPILED, TORCHCOMMSHIM=strategy)
    results, graphs, breaks, imported_early, frames = json.loads(done.stdout)
    return (results, graphs, breaks, imported_early), frames, done.stderr


def test_compile():
    """torch.compile gives the same results, graphs and breaks with us, and compiles no more frames.

    torch skips its own files; ours run with compilation disabled, and so does torch's part below them.
    """
    pytest.importorskip("torch", reason="needs torch")
    same, frames, _ = compiled("off")
    ours, our_frames, said = compiled("auto")

    assert ours == same
    assert our_frames <= frames
    assert "Graph break" not in said
    assert same[-1] is False
