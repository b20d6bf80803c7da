"""A process that compiles every kernel an operator launches, for GPUs that are not here.

Nothing is written down twice: each case runs through the operator's own launchers on meta tensors, forward and
backward, with Triton's launch stopped where it would compile. Triton itself specialises the arguments; its source,
options and target are kept and compiled later. So a launcher may read shapes, strides, dtypes and the device of its
tensors, never data, and asks Triton's active driver (not torch.cuda) what GPU it is on. Of an autotuned kernel every
configuration that survives pruning is a variant.

Parent and child speak JSON lines. The first line of the child lists the variants; each line it then reads names one
(`[target, variant]`) and is answered with its figures.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

import torch

from suite.bench.cases import cases
from suite.bench.disassembly import Figures, figures_of

CACHE = "figures-2.json"
"""Name of the figures beside a kernel in Triton's cache; raised when they come to mean something else."""


@dataclass(frozen=True)
class Target:
    """A GPU as Triton names it, and what a launcher may ask of it."""

    backend: str
    arch: str | int
    warp_size: int
    num_processors: int
    max_shared: int
    sets: tuple[str, ...]
    """Of the shapes whose kernels are compiled for it."""


# the one that the kernels are measured on, and of others enough to see that they compile
TARGETS = {
    "sm_80": Target("cuda", 80, 32, 108, 166912, ("quick",)),
    "sm_90": Target("cuda", 90, 32, 132, 232448, ("quick", "paper")),
    "gfx942": Target("hip", "gfx942", 64, 304, 65536, ("quick",)),
}


class AbsentGPU:
    """Triton's driver of a GPU that is not here: it knows the target and launches nothing."""

    def __init__(self, name: str) -> None:
        from triton.backends.compiler import GPUTarget

        target = TARGETS[name]
        # Triton keeps what it compiled by device number
        self.index = list(TARGETS).index(name)
        self.target = GPUTarget(target.backend, target.arch, target.warp_size)
        properties = {
            "max_shared_mem": target.max_shared,
            "multiprocessor_count": target.num_processors,
            "warpSize": target.warp_size,
        }
        self.utils = SimpleNamespace(get_device_properties=lambda device: properties)

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return self.index

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")

    def reason(self) -> str | None:
        """Why Triton cannot compile for it."""
        from triton.compiler.compiler import make_backend

        try:
            # looks for the assembler too
            make_backend(self.target).hash()
        except Exception as error:
            return " ".join(str(error).split())
        return None


class MetaGenerator(torch.Generator):
    """Draws nothing: says that it is on the meta device, so that inputs made with it are."""

    def __new__(cls, device: Any = None) -> MetaGenerator:
        return super().__new__(cls, "cpu")  # type: ignore[call-arg]

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("meta")


@dataclass(frozen=True)
class Launch:
    """A kernel as Triton would compile it."""

    source: Any
    options: dict[str, Any]
    chosen: dict[str, Any]
    """The options its launcher gave, num_warps and the like."""

    @property
    def name(self) -> str:
        """`_fwd_kernel[bf16+fp32 W=4 BLOCK_D=64 num_warps=4]#1f3a`; the digits stand for the signature."""
        parameters = self.source.fn.params
        pointers = [str(kind).lstrip("*k") for kind in self.source.signature.values() if str(kind).startswith("*")]
        constants = {p.name: self.source.constants.get((p.num,)) for p in parameters if p.is_constexpr}
        # a launcher may hand over a name as a constant or an option with its default, which says nothing
        given = {**constants, **{key: value for key, value in self.chosen.items() if value is not None}}
        parts = ["+".join(dict.fromkeys(pointers)), *(f"{key}={_short(value)}" for key, value in given.items())]
        readable = f"{self.source.name}[{' '.join(filter(None, parts))}]"
        return f"{readable}#{hashlib.sha256((readable + self.signature).encode()).hexdigest()[:4]}"

    @property
    def signature(self) -> str:
        """`x:*bf16/16 T:i32/16 stride_d=1 bias=None`: types, multiples of 16, and what Triton made constant."""
        parts = []
        for parameter in self.source.fn.params:
            kind = self.source.signature[parameter.name]
            if parameter.is_constexpr:
                continue
            if kind == "constexpr":
                parts.append(f"{parameter.name}={self.source.constants.get((parameter.num,))}")
                continue
            facts = dict(self.source.attrs.get((parameter.num,), ()))
            divisor = facts.get("tt.divisibility")
            parts.append(f"{parameter.name}:{kind}" + (f"/{divisor}" if divisor else ""))
        return " ".join(parts)


def _short(value: Any) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


@contextmanager
def recording(target: str) -> Iterator[list[Launch]]:
    """Inside, inputs are drawn on the meta device and launches end up in the list; that GPU stays the active one."""
    import triton
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    launches: list[Launch] = []
    chosen: dict[str, Any] = {}
    launch = JITFunction.run

    def keep(source: Any, target: Any = None, options: dict[str, Any] | None = None, **_: Any) -> None:
        launches.append(Launch(source, dict(options or {}), dict(chosen)))

    def run(self: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> None:
        chosen.clear()
        chosen.update((key, value) for key, value in kwargs.items() if key not in self.arg_names)
        # what an earlier case compiled belongs to this one too
        self.device_caches.clear()
        launch(self, *args, grid=grid, warmup=True, **kwargs)

    def run_all(self: Any, *args: Any, **kwargs: Any) -> None:
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        for config in self.prune_configs(kwargs):
            self.fn.run(*args, **kwargs, **config.all_kwargs())

    patches = (
        (triton.compiler, "compile", keep),
        (JITFunction, "run", run),
        (Autotuner, "run", run_all),
        (torch, "Generator", MetaGenerator),
    )
    driver.set_active(AbsentGPU(target))
    kept = [(place, name, getattr(place, name)) for place, name, _ in patches]
    for place, name, value in patches:
        setattr(place, name, value)
    try:
        yield launches
    finally:
        for place, name, value in kept:
            setattr(place, name, value)


def record(workload: Any, target: str) -> tuple[dict[str, Launch], list[str]]:
    """The variants of an operator by name, and why a case has none that should (one line each)."""
    from suite.bench.measure import Unavailable, find, prepare

    variants: dict[str, Launch] = {}
    failures: dict[str, None] = {}
    for case in cases(workload, TARGETS[target].sets, ("ours",)):
        implementation = find(workload, case.implementation)
        if not implementation.cold_start or implementation.supports(dict(case.shape), getattr(torch, case.dtype)):
            continue
        try:
            with recording(target) as launches:
                prepare(workload, case, torch.device("meta"))()
        except Exception as error:
            reason = str(error) if isinstance(error, Unavailable) else f"{type(error).__name__}: {error}"
            failures[f"{case}: cannot be run on meta tensors: {' '.join(reason.split())}"] = None
            continue
        if not launches:
            failures[f"{case}: launches no Triton kernel on meta tensors"] = None
        for launch in launches:
            name = f"{workload.op}/{launch.name}"
            known = variants.setdefault(name, launch)
            assert known.signature == launch.signature, f"two kernels are called {name}"
    return variants, list(failures)


def compile_variant(launch: Launch, target: str) -> Figures:
    """Compiles, or finds in Triton's cache, and reads the figures, which are kept beside it.

    ValueError where the GPU could not start it, which the compiler does not look at.
    """
    import triton
    from triton.runtime.cache import get_cache_manager
    from triton.runtime.driver import driver

    gpu = AbsentGPU(target)
    # a kernel may ask while it is compiled
    driver.set_active(gpu)
    compiled = triton.compile(launch.source, target=gpu.target, options=launch.options)
    if (shared := compiled.metadata.shared) > (limit := TARGETS[target].max_shared):
        raise ValueError(f"takes {shared} bytes of shared memory, of which the GPU has {limit}")
    cache = get_cache_manager(compiled.hash)
    if found := cache.get_file(CACHE):
        with open(found) as file:
            return Figures(**json.load(file))
    figures = figures_of(compiled)
    cache.put(json.dumps(asdict(figures)), CACHE, binary=False)
    return figures


def serve(workloads: Mapping[str, str], targets: Sequence[str]) -> None:
    """The child's end; `workloads` says where the workload of an operator stands."""
    from triton.runtime.driver import driver

    # an operator's own prints must not end up between two answers
    answers, sys.stdout = sys.stdout, sys.stderr
    gpus = {name: AbsentGPU(name) for name in targets}
    unavailable = {name: reason for name, gpu in gpus.items() if (reason := gpu.reason())}
    variants: dict[str, dict[str, Launch]] = {name: {} for name in targets if name not in unavailable}
    failures: dict[str, None] = {}
    # a decorator may already ask which GPU there is
    driver.set_active(next(iter(gpus.values())))
    for op, place in workloads.items():
        module, attribute = place.split(":")
        try:
            workload = getattr(importlib.import_module(module), attribute)
        except Exception as error:
            failures[f"{op}: {type(error).__name__}: {error}"] = None
            continue
        for target, known in variants.items():
            found, failed = record(workload, target)
            known.update(found)
            failures.update(dict.fromkeys(failed))
    listed = {target: {name: launch.signature for name, launch in known.items()} for target, known in variants.items()}
    first = {"variants": listed, "unavailable": unavailable, "failures": list(failures)}
    print(json.dumps(first), file=answers, flush=True)
    for line in sys.stdin:
        target, name = json.loads(line)
        try:
            answer: Any = asdict(compile_variant(variants[target][name], target))
        except Exception as error:
            answer = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    serve(**json.loads(sys.argv[1]))
