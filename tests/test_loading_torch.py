# SPDX-License-Identifier: Apache-2.0
"""Getting loaded, with a real torch: what is wrapped once `import torch` is done, however it was done."""

from __future__ import annotations

import json
import sys
import textwrap

import pytest
from conftest import ARMED_BY, PTH, run
from fetch_torch_sources import source
from test_traits import EXPECTED, holding, probe

from torchcommshim.repair import traits

torch = pytest.importorskip("torch", reason="needs torch")

# Prints, for each name that the shim wraps, whether every module that has the name has it wrapped.
WRAPPED_EVERYWHERE = """
import json, sys
from torchcommshim.repair.traits import OPTIONAL, WRAPPED
modules = [vars(module) for name, module in sys.modules.items() if name.startswith("torch.distributed")]
found = {name: [names[name] for names in modules if name in names] for name in (*WRAPPED, *OPTIONAL)}
found = {name: functions for name, functions in found.items() if functions}
origins = {name: {each.__globals__["__name__"] for each in functions} for name, functions in found.items()}
print(json.dumps({name: origin == {"torchcommshim.patches"} for name, origin in origins.items()}))
"""
ALL_WRAPPED = dict.fromkeys(
    (*traits.WRAPPED, *(name for name in traits.OPTIONAL if hasattr(torch.distributed, name))), True
)


def python(program, *flags, **environment):
    """Run a program in a new interpreter of this environment; returns what it printed."""
    return run(sys.executable, *flags, "-c", textwrap.dedent(program), **environment).stdout


def script(tmp_path, text):
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(text))
    return path


@pytest.mark.parametrize("flags", [(), ("-I",)])
@pytest.mark.parametrize(
    "statement", ["import torch", "import torch.distributed.device_mesh", "from torch import nn"]
)
def test_import(statement, flags):
    """Whatever is imported of torch, every copy of each name in torch.distributed is the wrapped one."""
    assert json.loads(python(f"{statement}\n{WRAPPED_EVERYWHERE}", *flags)) == ALL_WRAPPED


# The last of them is imported by distributed_c10d, which is half-imported at that moment.
MOMENTS = [
    "torch.version",
    "torch.distributed",
    "torch.distributed.device_mesh",
    "torch.distributed.c10d_logger",
]


@pytest.mark.parametrize("moment", MOMENTS)
def test_torch_half_imported(moment):
    """`install()` in the middle of `import torch`, at any moment of it, ends with everything wrapped."""
    program = f"""
        import os, sys
        del os.environ["TORCHCOMMSHIM"]
        import torchcommshim

        class Meddler:
            met = False
            def find_spec(self, name, path=None, target=None):
                if name == {moment!r} and not self.met:
                    self.met = True
                    torchcommshim.install()

        meddler = Meddler()
        sys.meta_path.insert(0, meddler)
        import torch.distributed.device_mesh
        assert meddler.met
    """
    printed = python(textwrap.dedent(program) + WRAPPED_EVERYWHERE, TORCHCOMMSHIM="off")

    assert json.loads(printed) == ALL_WRAPPED


def test_install_after_import():
    """`install()` after `import torch` wraps the copies that other modules took, device_mesh's included."""
    program = """
import os
del os.environ["TORCHCOMMSHIM"]
import torch.distributed.device_mesh, torchcommshim
from torch.distributed import new_group
torchcommshim.install()
assert new_group.__globals__["__name__"] == "torchcommshim.patches"
"""

    assert json.loads(python(program + WRAPPED_EVERYWHERE, TORCHCOMMSHIM="off")) == ALL_WRAPPED


def test_looking_for_torch_imports_nothing():
    """`find_spec("torch")` imports neither wrapt nor packaging nor torch."""
    program = """
        import importlib.util, sys
        print(importlib.util.find_spec("torch") is not None)
        print({"torch", "wrapt", "packaging", "torchcommshim.patches"} & set(sys.modules))
    """

    assert python(program) == "True\nset()\n"


def test_import_of_torch_imports_little():
    """What makes groups is imported with the first group."""
    program = """
        import sys, torch
        print(*sorted(name for name in sys.modules if name.startswith("torchcommshim.")))
    """
    names = ("patches", "repair", "repair.traits", "settings", "tell", "tell.report")
    expected = [f"torchcommshim.{name}" for name in names]

    assert python(program).split() == expected


def test_off():
    """With TORCHCOMMSHIM=off, `import torch` imports nothing of ours, and nothing is wrapped."""
    program = """
        import sys, torch.distributed as dist
        print("torchcommshim" in dist.new_group.__globals__["__name__"])
        print("wrapt" in sys.modules, "torchcommshim.patches" in sys.modules)
    """

    assert python(program, TORCHCOMMSHIM="off") == "False\nFalse False\n"


def test_import_is_silent():
    """`import torch` prints nothing of ours."""
    done = run(sys.executable, "-W", "ignore", "-c", "import torch.distributed")

    assert (done.stdout, done.stderr) == ("", "")


def test_pickled_into_spawned_ranks(tmp_path):
    """Wrapped functions go through mp.spawn's pickle, and each rank gets its own wrapped one."""
    program = script(
        tmp_path,
        """
        import functools, sys
        import torch.distributed as dist
        import torch.multiprocessing as mp

        def rank_main(rank, new_group, partial, folder):
            same = new_group is dist.new_group and partial.func is dist.init_process_group
            with open(f"{folder}/{rank}", "w") as file:
                file.write(f"{same} {new_group.__globals__['__name__']}")

        if __name__ == "__main__":
            partial = functools.partial(dist.init_process_group, "gloo")
            mp.spawn(rank_main, (dist.new_group, partial, sys.argv[1]), nprocs=2)
        """,
    )

    run(sys.executable, program, tmp_path)

    assert [(tmp_path / rank).read_text() for rank in "01"] == ["True torchcommshim.patches"] * 2


def test_torchrun(tmp_path):
    """torchrun's agent and each of its ranks are armed."""
    program = script(tmp_path, f"import sys; open(sys.argv[1], 'a').write(str({ARMED_BY}))")
    ranks = tmp_path / "ranks"
    agent = f"""
        import sys
        from torch.distributed.run import main
        main(["--standalone", "--nproc-per-node=2", {str(program)!r}, {str(ranks)!r}])
        print({ARMED_BY}, sys.modules["torch.distributed"].new_group.__globals__["__name__"])
    """

    assert python(agent) == f"{PTH} torchcommshim.patches\n"
    assert ranks.read_text() == f"{PTH}{PTH}"


def test_forked_rank():
    """A rank that is forked after `import torch` has what its parent had."""
    program = """
        import os, torch.distributed as dist
        pid = os.fork()
        if pid == 0:
            print(dist.new_group.__globals__["__name__"], flush=True)
            os._exit(0)
        os.waitpid(pid, 0)
    """

    assert python(program) == "torchcommshim.patches\n"


def test_healthy_program_says_nothing(tmp_path):
    """Two gloo ranks that make a group and add up get the right sum, and not a line from us."""
    program = script(
        tmp_path,
        """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        dist.new_group([0])
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == 2, total
        dist.destroy_process_group()
        """,
    )

    done = run(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", program)

    assert "torchcommshim" not in done.stdout + done.stderr


def test_traits_of_the_installed_torch():
    """Probing the loaded module, with its decorators and wrappers, finds what probing its source finds."""
    import torch.distributed.distributed_c10d as module

    version = torch.__version__
    release = version.partition("+")[0]
    found = traits.probe(traits.code_of_module(module), version)

    assert holding(found) == EXPECTED[release] == holding(probe(source(release), release))
