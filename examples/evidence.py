# SPDX-License-Identifier: Apache-2.0
"""Run pretrain_gpt.sh in several ways and compare: does it train, does it hang and where, which losses.

    python evidence.py cpu --out FOLDER          layouts of ranks, gloo: PP1, PP2, PP4, DP2xPP2; 4 minutes
    python evidence.py gpu --out FOLDER          without and with the shim, NCCL, one GPU is enough; 8 minutes
    python evidence.py gpu --out FOLDER --jobs 4 --only reference-1 off-4 auto-4
    python evidence.py gpus --out FOLDER         a GPU a rank, 2 to 8: that many stages, and two by two

Each run goes under a deadline. FOLDER gets evidence.json, losses.png if matplotlib is installed, and what
each run printed. A table is printed; exit 0 if every run that should train did.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import math
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
STRATEGIES = ("auto", "strip", "split")
FLOAT16 = "--fp16 --initial-loss-scale 65536"
ENGINE = f"--transformer-impl transformer_engine {FLOAT16}"
STACK = "(most recent call first)"  # above each thread that faulthandler shows; the main thread comes last


@dataclass
class Run:
    """One training, and what came of it.

    Attributes:
        name: what it is called in the table.
        ranks, stages: processes, and pipeline stages among them.
        shim: value of TORCHCOMMSHIM.
        layers: of the model.
        extra: flags after the script's own.
        script: run in place of pretrain_gpt.py, relative to this folder.
        must_train: without the shim a run may hang.
        deadline: seconds until each rank says where it is; if nothing moves then, the run is hung.
        outcome: trained, hang or error.
        iterations: how many it did.
        seconds: how long it took.
        losses: of each iteration.
        where: for a hung run, where each rank was: file:line function, innermost first.
        said: what the shim said.
    """

    name: str
    ranks: int
    stages: int
    shim: str = "off"
    layers: int = 4
    extra: str = ""
    script: str = "pretrain_gpt.py"
    must_train: bool = True
    deadline: int = 100
    outcome: str = ""
    iterations: int = 0
    seconds: float = 0.0
    losses: list[float] = field(default_factory=list)
    where: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)


def cpu_runs() -> list[Run]:
    """The layouts that must agree."""
    layouts = {"PP1": (1, 1), "PP2": (2, 2), "PP4": (4, 4), "DP2xPP2": (4, 2)}
    return [Run(name, ranks, stages, deadline=300) for name, (ranks, stages) in layouts.items()]


def gpu_runs() -> list[Run]:
    """Each strategy in 4 and 8 ranks; float16; Transformer Engine and megatron-core where installed."""
    core = "megatron_core/pretrain_gpt.py"
    runs = [Run("reference-1", 1, 1)]
    for ranks in (4, 8):
        runs.append(Run(f"off-{ranks}", ranks, 4, must_train=False, deadline=40))
        runs += [Run(f"{strategy}-{ranks}", ranks, 4, strategy) for strategy in STRATEGIES]
    runs.append(Run("auto-fp16-8", 8, 4, "auto", extra=FLOAT16))
    if importable("transformer_engine.pytorch"):
        runs.append(Run("auto-te-fp16-4", 4, 4, "auto", extra=ENGINE))
    if importable("megatron.core"):
        runs.append(Run("off-megatron-core-8", 8, 4, "off", script=core, must_train=False, deadline=60))
        runs.append(Run("auto-megatron-core-8", 8, 4, "auto", extra=FLOAT16, script=core))
    return runs


def several_gpus_runs(gpus: int, engine: bool) -> list[Run]:
    """Each rank on a GPU of its own: as many stages as GPUs, and DP2xPP2; `engine`: with TE layers too."""
    layers = math.lcm(4, gpus)
    layouts = {f"PP{gpus}": (gpus, gpus), **({"DP2xPP2": (4, 2)} if gpus >= 4 else {})}
    runs = [Run("reference-1", 1, 1, layers=layers)]
    for name, (ranks, stages) in layouts.items():
        runs.append(Run(f"off-{name}", ranks, stages, layers=layers, must_train=False, deadline=40))
        runs += [Run(f"{strategy}-{name}", ranks, stages, strategy, layers) for strategy in STRATEGIES]
        if engine:
            runs.append(Run(f"auto-te-fp16-{name}", ranks, stages, "auto", layers, ENGINE))
    return runs


def importable(module: str) -> bool:
    """Can a new interpreter import `module` after torch?"""
    command = [sys.executable, "-c", f"import torch, {module}"]
    return not subprocess.run(command, capture_output=True, check=False).returncode


def version(package: str) -> str | None:
    """The version of an installed package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def execute(run: Run, args: argparse.Namespace, port: int) -> None:
    """Start pretrain_gpt.sh for `run` and fill in what came of it."""
    folder = args.out / run.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    environment = {
        **os.environ,
        "PYTHON": sys.executable,
        "LAUNCH": f"{sys.executable} -m torch.distributed.run --redirects 3 --log-dir {folder / 'ranks'}",
        "GPUS_PER_NODE": str(run.ranks),
        "PP": str(run.stages),
        "NUM_LAYERS": str(run.layers),
        "TRAIN_ITERS": str(args.iterations),
        "TRANSFORMER_IMPL": "local",
        "MASTER_PORT": str(port),
        "EXTRA_ARGS": run.extra,
        "SCRIPT": str(HERE / run.script),
        "VIA": str(HERE / "one_gpu.py"),
        "HANG_AFTER": str(run.deadline),
        "TORCHCOMMSHIM": run.shim,
        "OMP_NUM_THREADS": "1",
    }
    data = args.out / "data" / "stdlib"
    paths = [folder / "checkpoints", folder / "tensorboard", data, f"{data}.model"]
    started = time.monotonic()
    with open(folder / "stdout", "w") as out, open(folder / "stderr", "w") as err:
        process = subprocess.Popen(
            ["bash", HERE / "pretrain_gpt.sh", *paths],
            stdout=out,
            stderr=err,
            env=environment,
            start_new_session=True,
        )
        # When time is up, counted from when it has torch, a rank says where it is and goes on.
        limit = started + run.deadline + 300
        while process.poll() is None and not stuck(run, folder) and time.monotonic() < limit:
            time.sleep(1)
        if process.poll() is None:
            process.terminate()  # torchrun ends its ranks, within 30 seconds
        code = process.wait()
    run.seconds = round(time.monotonic() - started, 1)
    out, err = ([file.read_text() for file in rank_files(folder, name)] for name in ("stdout", "stderr"))
    judge(run, code, out, err, args.iterations)


def stuck(run: Run, folder: Path) -> bool:
    """Time was up on all ranks, and none has printed anything for 15 seconds."""
    up = sum("Timeout (" in file.read_text() for file in rank_files(folder, "stderr"))
    return up == run.ranks and all(
        time.time() - file.stat().st_mtime > 15 for file in rank_files(folder, "stdout")
    )


def rank_files(folder: Path, name: str) -> list[Path]:
    """What each rank wrote to `name`, rank by rank."""
    return sorted(folder.glob(f"ranks/*/attempt_0/*/{name}.log"), key=lambda path: int(path.parent.name))


def judge(run: Run, code: int, out: list[str], err: list[str], iterations: int) -> None:
    """Read the outcome from what each rank printed."""
    log = "".join(out)
    run.losses = [float(loss) for loss in re.findall(r"lm loss: (\S+) \|", log)]
    run.iterations = len(re.findall(r"^ \[.*\] iteration ", log, re.MULTILINE))
    run.said = sorted(
        {line for text in err for line in text.splitlines() if line.startswith("torchcommshim")}
    )
    run.where = [f"rank {rank}: {innermost(text)}" for rank, text in enumerate(err) if "Timeout (" in text]
    if code == 0 and run.iterations == iterations:
        run.outcome, run.where = "trained", []  # it was slow, and has ended
    else:
        run.outcome = "hang" if run.where else "error"


def innermost(dump: str) -> str:
    """The calls of a dumped stack's main thread, from the innermost to the first outside torch."""
    main_thread = dump.split(STACK)[-1]
    calls = []
    for file, line, function in re.findall(r'File "([^"]*)", line (\d+) in (\S+)', main_thread):
        calls.append(f"{Path(file).name}:{line} {function}")
        if "torch" not in Path(file).parts:
            break
    return " < ".join(calls)


def table(runs: list[Run]) -> str:
    """The outcome of all runs, in Markdown."""
    lines = [
        "| run | ranks | stages | shim | outcome | iterations | first loss | last loss | seconds |",
        "|---" * 9 + "|",
    ]
    for run in runs:
        first, last = (f"{run.losses[index]:.4f}" if run.losses else "" for index in (0, -1))
        cells = (
            run.name,
            run.ranks,
            run.stages,
            run.shim,
            run.outcome,
            run.iterations,
            first,
            last,
            run.seconds,
        )
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    hung = [f"{run.name}, {where}" for run in runs for where in run.where]
    return "\n".join(lines + [""] * bool(hung) + hung)


def plot(runs: list[Run], path: Path) -> None:
    """Draw the losses of the runs that have any, one line each."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    trained = [run for run in runs if run.losses]
    for place, run in enumerate(trained):
        numbers = range(1, len(run.losses) + 1)
        marks = {"marker": "ov^sDPX*"[place % 8], "markevery": (place, len(trained)), "markersize": 5}
        axes.plot(
            numbers, run.losses, label=run.name, linewidth=0.8, **marks
        )  # one line hides another, not its marks
    axes.set(xlabel="iteration", ylabel="lm loss")
    axes.grid(alpha=0.3)
    if trained:
        axes.legend(fontsize="small", ncols=2)
    figure.savefig(path, dpi=120)


def main() -> int:
    """Run, judge, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("device", choices=("cpu", "gpu", "gpus"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--only", nargs="+", metavar="RUN")
    parser.add_argument(
        "--jobs", type=int, default=1, help="runs at a time, after the first, which makes the data"
    )
    parser.add_argument(
        "--port", type=int, default=29600, help="the first port used; each run takes the next"
    )
    args = parser.parse_args()
    args.out = args.out.resolve()

    import torch

    gpus = torch.cuda.device_count()
    if (args.device != "cpu") != bool(gpus) or (args.device == "gpus" and not 2 <= gpus <= 8):
        parser.error(f"{args.device}: torch finds {gpus} GPUs")
    if args.device == "gpus":
        runs = several_gpus_runs(gpus, engine=importable("transformer_engine.pytorch"))
    else:
        runs = cpu_runs() if args.device == "cpu" else gpu_runs()
    runs = [run for run in runs if not args.only or run.name in args.only]
    if not runs:
        parser.error(f"--only {' '.join(args.only)}: there is no such run")
    machine = {
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if gpus else None,
        "gpu": torch.cuda.get_device_name() if gpus else None,
        "gpus": gpus,
        "transformer_engine": version("transformer_engine"),
        "megatron-core": version("megatron-core"),
    }
    written = threading.Lock()

    def play(number: int) -> None:
        run = runs[number]
        execute(run, args, args.port + number)
        line = f"{run.name}: {run.outcome}, {run.iterations} iterations, {run.seconds} s"
        with written:
            print(line, file=sys.stderr, flush=True)
            content = {**machine, "jobs": args.jobs, "runs": [asdict(run) for run in runs if run.outcome]}
            (args.out / "evidence.json").write_text(json.dumps(content, indent=1))

    play(0)
    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(play, range(1, len(runs))))
    if importlib.util.find_spec("matplotlib"):
        plot(runs, args.out / "losses.png")
    print(table(runs))
    return int(any(run.must_train and run.outcome != "trained" for run in runs))


if __name__ == "__main__":
    sys.exit(main())
