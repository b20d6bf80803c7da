"""A process that compiles every kernel an operator launches, for GPUs that this machine need not have.

No list of kernels is written by hand. Each case of a workload runs through the operator's own launchers on meta
tensors, forward and backward, and Triton's launch is stopped where it would compile. By then Triton has specialised
the arguments; its source, options and target are kept and compiled later. A launcher may therefore read shapes,
strides, dtypes and the device of its tensors but never data, and it must ask Triton's active driver (not torch.cuda)
for the GPU. Every configuration of an autotuned kernel that survives pruning is a variant.

Parent and child exchange JSON lines. The child's first line lists the variants with their signatures and digests, and
what a call of each case starts and allocates (`suite.bench.calls`). Each line that it then reads names a variant
(`[target, variant]`), and the child answers with its figures.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

import torch

from subquad.suite.bench.calls import Calls, Counting
from subquad.suite.bench.cases import cases
from subquad.suite.bench.disassembly import Figures, figures_of
from subquad.suite.bench.source import source_digest
from subquad.suite.registry import Entry

CACHE = "figures-6.json"
"""Name of the file of figures beside a kernel in Triton's cache. Its number is raised when their meaning changes."""


@dataclass(frozen=True)
class Target:
    """A GPU as Triton names it, and what a launcher may ask of it."""

    backend: str
    arch: str | int
    warp_size: int
    num_processors: int
    max_shared: int
    sets: tuple[str, ...]
    """The sets of shapes whose kernels are compiled for this GPU."""


# all shapes for the GPU on which the kernels are measured; for the others, enough to see that the kernels compile
TARGETS = {
    "sm_80": Target("cuda", 80, 32, 108, 166912, ("quick",)),
    "sm_90": Target("cuda", 90, 32, 132, 232448, ("quick", "paper")),
    "gfx942": Target("hip", "gfx942", 64, 304, 65536, ("quick",)),
}


class AbsentGPU:
    """A driver for Triton that describes a GPU which this machine need not have, and that launches nothing."""

    def __init__(self, name: str) -> None:
        from triton.backends.compiler import GPUTarget

        target = TARGETS[name]
        # Triton caches compiled kernels by device number, so each target needs its own
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
        """Why Triton cannot compile for this GPU; None where it can."""
        from triton.compiler.compiler import make_backend

        try:
            # the hash contains the version of the assembler, which must be found for that
            make_backend(self.target).hash()
        except Exception as error:
            return " ".join(str(error).split())
        return None


class MetaGenerator(torch.Generator):
    """A generator that reports the meta device, so that inputs drawn with it are meta tensors."""

    def __new__(cls, device: Any = None) -> MetaGenerator:
        return super().__new__(cls, "cpu")  # type: ignore[call-arg]

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("meta")


@dataclass(frozen=True)
class Launch:
    """One kernel with everything that Triton compiles it from."""

    source: Any
    options: dict[str, Any]
    chosen: dict[str, Any]
    """The options that the launcher gave, such as num_warps; `options` has Triton's defaults as well."""
    alternative: bool = False
    """Whether an autotuned kernel starts in this configuration or in an earlier one, so that both are one launch."""

    @property
    def name(self) -> str:
        """`_fwd_kernel[bf16+fp32 W=4 BLOCK_D=64 num_warps=4]#1f3a`; the digits are a digest of the signature."""
        parameters = self.source.fn.params
        pointers = [str(kind).lstrip("*k") for kind in self.source.signature.values() if str(kind).startswith("*")]
        constants = {p.name: self.source.constants.get((p.num,)) for p in parameters if p.is_constexpr}
        # an option that the launcher leaves at None is Triton's default, and `launch` fuses in every kernel
        chosen = {k: v for k, v in self.chosen.items() if v is not None and k != "enable_fp_fusion"}
        given = constants | chosen
        parts = ["+".join(dict.fromkeys(pointers)), *(f"{key}={_short(value)}" for key, value in given.items())]
        readable = f"{self.source.name}[{' '.join(filter(None, parts))}]"
        return f"{readable}#{hashlib.sha256((readable + self.signature).encode()).hexdigest()[:4]}"

    @property
    def signature(self) -> str:
        """`x:*bf16/16 T:i32/16 stride_d=1 bias=None`: types, multiples of 16, and arguments that became constants."""
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

    def digest(self, target: str) -> str:
        """A digest of all that the figures depend on besides the version of Triton, in 16 hexadecimal digits."""
        gpu = TARGETS[target]
        constants = {index: _constant(value) for index, value in sorted(self.source.constants.items())}
        # Triton's own libraries stand in the options with a path of this machine
        options = {**self.options, "extern_libs": sorted(dict(self.options.get("extern_libs") or ()))}
        parts = (
            CACHE,
            (gpu.backend, gpu.arch, gpu.warp_size, gpu.max_shared),
            source_digest(self.source.fn),
            sorted(self.source.signature.items()),
            constants,
            sorted(self.source.attrs.items()),
            sorted(options.items()),
        )
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _constant(value: Any) -> str:
    """A value of a constexpr parameter as text; of a function, its digest."""
    return source_digest(value) if hasattr(value, "fn") else repr(value)


def _short(value: Any) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


@contextmanager
def recording(target: str) -> Iterator[list[Launch]]:
    """Within this context inputs are meta tensors, and launches are appended to the list instead of being compiled.

    The target remains Triton's active GPU afterwards.
    """
    import triton
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    launches: list[Launch] = []
    chosen: dict[str, Any] = {}
    alternative = False
    launch = JITFunction.run

    def keep(source: Any, target: Any = None, options: dict[str, Any] | None = None, **_: Any) -> None:
        launches.append(Launch(source, dict(options or {}), dict(chosen), alternative))

    def run(self: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> None:
        chosen.clear()
        chosen.update((key, value) for key, value in kwargs.items() if key not in self.arg_names)
        # Triton skips `compile` for a kernel that an earlier case launched, but this case launches it, too
        self.device_caches.clear()
        launch(self, *args, grid=grid, warmup=True, **kwargs)

    def run_all(self: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal alternative
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        for index, config in enumerate(self.prune_configs(kwargs)):
            alternative = index > 0
            self.fn.run(*args, **kwargs, **config.all_kwargs())
        alternative = False

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


def record(workload: Any, target: str) -> tuple[dict[str, Launch], dict[str, Calls], list[str]]:
    """The variants of an operator by name, the calls by case, and a line for each case that could not be recorded."""
    from subquad.suite.bench.measure import Unavailable, find, prepare

    variants: dict[str, Launch] = {}
    calls: dict[str, Calls] = {}
    failures: dict[str, None] = {}
    for case in cases(workload, TARGETS[target].sets, ("ours",)):
        implementation = find(workload, case.implementation)
        if not implementation.cold_start or implementation.supports(dict(case.shape), getattr(torch, case.dtype)):
            continue
        try:
            with recording(target) as launches:
                call = prepare(workload, case, torch.device("meta"))
                call()
                # a first call also makes the cotangents, and tensors that the launcher keeps for later ones
                first, counted = len(launches), Calls()
                with Counting(counted):
                    call()
                counted.kernels.update(x.source.name for x in launches[first:] if not x.alternative)
                calls[str(case)] = counted
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
    return variants, calls, list(failures)


def compile_variant(launch: Launch, target: str) -> Figures:
    """The figures of a kernel, which is compiled unless Triton's cache has it. Figures are cached beside the kernel.

    ValueError where the kernel takes more shared memory than the GPU has, which the compiler does not check.
    """
    import triton
    from triton.runtime.cache import get_cache_manager
    from triton.runtime.driver import driver

    gpu = AbsentGPU(target)
    # a constexpr function may ask for the GPU while its kernel is compiled
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


def serve(workloads: Mapping[str, str], targets: Sequence[str], path: Sequence[str]) -> None:
    """The loop of the child process.

    workloads: the place of each operator's workload, as in `suite.registry.Entry`.
    path:      folders in which modules are found, with those of plugins.
    """
    from triton.runtime.driver import driver

    sys.path.extend(folder for folder in path if folder not in sys.path)
    # prints of operators go to stderr, so that they do not mix with the answers
    answers, sys.stdout = sys.stdout, sys.stderr
    gpus = {name: AbsentGPU(name) for name in targets}
    unavailable = {name: reason for name, gpu in gpus.items() if (reason := gpu.reason())}
    variants: dict[str, dict[str, Launch]] = {name: {} for name in targets if name not in unavailable}
    calls: dict[str, dict[str, str]] = {name: {} for name in variants}
    failures: dict[str, None] = {}
    # a decorator may ask for the GPU when its module is imported
    driver.set_active(next(iter(gpus.values())))
    for op, place in workloads.items():
        try:
            workload = Entry(place, "").load()
        except Exception as error:
            failures[f"{op}: {type(error).__name__}: {error}"] = None
            continue
        for target, known in variants.items():
            found, counted, failed = record(workload, target)
            known.update(found)
            calls[target].update((case, str(counts)) for case, counts in counted.items())
            failures.update(dict.fromkeys(failed))
    listed = {
        target: {name: (launch.signature, launch.digest(target)) for name, launch in known.items()}
        for target, known in variants.items()
    }
    first = {"variants": listed, "calls": calls, "unavailable": unavailable, "failures": list(failures)}
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
