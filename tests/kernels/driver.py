"""Triton's own launcher without a GPU: a driver that compiles for sm_90 and tells what a GPU would be given.

    python -m tests.kernels.driver FOLDER

makes the driver in a folder that the environment names (`environment`), and launches kernels as operators do.
"""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

STUBS = """
typedef unsigned long long word;
static int (*told)(void *, void *, void **, void **);
void tell(int (*f)(void *, void *, void **, void **)) { told = f; }
int cuLaunchKernelEx(void *config, void *function, void **values, void **more) {
  return told(config, function, values, more);
}
static int unloaded;
int num_unloaded() { return unloaded; }
int cuModuleUnload() { return unloaded++, 0; }
int cuModuleLoadData(word *module) { static word last = 1; return *module = last++, 0; }
int cuModuleGetFunction(word *function, word module) { return *function = 1000 + module, 0; }
int cuFuncGetAttribute(int *value) { return *value = 1024, 0; }
int cuDeviceGetAttribute(int *value) { return *value = 1 << 17, 0; }
int cuPointerGetAttribute(word *to, int which, word from) { return *to = from, 0; }
int cuCtxGetCurrent(word *context) { return *context = 1, 0; }
int cuGetErrorString(int error, char **text) { return *text = "no GPU", 0; }
int cuDriverGetVersion(int *version) { return *version = 13000, 0; }
"""
OTHERS = "CtxGetDevice CtxGetLimit CtxSetCurrent CtxSetLimit DeviceGet DevicePrimaryCtxRetain FuncSetAttribute"
OTHERS += " FuncSetCacheConfig StreamIsCapturing"
STREAM = 0x77
SIZES = {"*": 8, "i64": 8, "i32": 4, "fp32": 4}


def environment(folder: Path) -> dict[str, str]:
    """The variables with which Triton finds the driver."""
    names = "TRITON_LIBCUDA_PATH", "LD_LIBRARY_PATH", "TRITON_CACHE_DIR"
    return os.environ | dict.fromkeys(names, str(folder)) | {"TRITON_INTERPRET": "0"}


class Told(NamedTuple):
    """A launch as the driver gets it."""

    function: int
    grid: tuple[int, ...]
    threads: int
    stream: int
    num_attributes: int
    values: tuple[int, ...]
    """The bytes of the arguments that are not constants, each as one number."""


def driver(folder: Path) -> tuple[list[Told], ctypes.CDLL]:
    """Makes a driver of stubs the active one; returns the launches that it is told, and its library."""
    source, library = folder / "driver.c", folder / "libcuda.so.1"
    source.write_text(STUBS + "".join(f"int cu{name}(void) {{ return 0; }}\n" for name in OTHERS.split()))
    subprocess.run(["cc", "-shared", "-fPIC", "-w", str(source), "-o", str(library)], check=True)
    loaded = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    torch.version.cuda = "13.0"
    torch.cuda.is_available = lambda: True
    from triton.backends.nvidia import driver as nvidia

    active = nvidia.CudaDriver()
    active.get_current_device = lambda: 0
    active.get_device_capability = lambda *_: (9, 0)
    active.get_current_stream = lambda _: STREAM
    triton.runtime.driver.set_active(active)
    # the driver is told addresses of values, and the launcher knows their types
    types: list[str] = []
    make, launch = nvidia.CudaLauncher.__init__, nvidia.CudaLauncher.__call__

    def remember(self: Any, source: Any, metadata: Any) -> None:
        make(self, source, metadata)
        self.types = [kind for kind in source.signature.values() if kind != "constexpr"]

    def start(self: Any, *given: Any) -> None:
        types[:] = self.types
        launch(self, *given)

    nvidia.CudaLauncher.__init__, nvidia.CudaLauncher.__call__ = remember, start
    told: list[Told] = []

    @ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)
    def tell(config: int, function: int, values: int, more: int) -> int:
        numbers = (ctypes.c_uint * 7).from_address(config)
        stream, _, num_attributes = (ctypes.c_uint64 * 3).from_address(config + 32)
        places = (ctypes.c_uint64 * len(types)).from_address(values)
        found = []
        for place, kind in zip(places, types, strict=True):
            size = SIZES["*" if kind.startswith("*") else kind]
            found.append(int.from_bytes(ctypes.string_at(place, size), "little"))
        told.append(Told(function, tuple(numbers[:3]), numbers[3], stream, num_attributes & 0xFFFFFFFF, tuple(found)))
        return 0

    loaded.tell(tell)
    # it is called to the end of the process
    loaded.teller = tell
    return told, loaded


@triton.jit
def _every_kind_kernel(x, nothing, y, one, T, large, scale, BLOCK: tl.constexpr, PRECISION: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b_x = tl.load(x + o, mask=o < T) * scale + large + one
    if nothing is not None:
        b_x += tl.load(nothing + o, mask=o < T)
    tl.store(y + o, b_x, mask=o < T)


def main(folder: Path) -> None:
    """Fails where a launch that is made again differs in anything but the memory of that call."""
    told, library = driver(folder)
    from subquad.kernels.launch import Launcher, LaunchPlan
    from subquad.kernels.replay import Replayed

    torch.Tensor.get_device = lambda x: 0
    launch = Launcher()
    assert launch.relaunches
    named = {"one": 1, "T": 48, "large": 1 << 40, "scale": 0.1, "BLOCK": 64, "PRECISION": "tf32"}
    plan = LaunchPlan((3, 2), **named, num_warps=2, launch_pdl=True)

    def double(tensors: Any) -> Any:
        (x,) = tensors
        between, y = torch.empty(128), torch.empty(64)
        launch(_every_kind_kernel, plan, x=x, nothing=None, y=between[64:])
        launch(_every_kind_kernel, (3, 2), x=between[64:], nothing=None, y=y, **named, num_warps=2, launch_pdl=True)
        return (y,)

    twice = Replayed(double, launch)
    calls = []
    for _ in range(4):
        x = torch.empty(64)
        (y,) = twice((x,))
        first, second = told
        assert first.values[0] == x.data_ptr()
        assert second.values[1] == y.data_ptr()
        assert first.values[1] == second.values[0]
        calls.append([launched._replace(values=launched.values[2:]) for launched in told])
        told.clear()
        # the compiled kernel must outlive Triton's own table
        _every_kind_kernel.device_caches.clear()
        gc.collect()
        twice.function = double if len(calls) < 2 else None
    assert library.num_unloaded() == 0
    scale = int.from_bytes(bytes(ctypes.c_float(0.1)), "little")
    wanted = Told(calls[0][0].function, (3, 2, 1), 64, STREAM, 1, (48, 1 << 40, scale))
    assert calls == [[wanted] * 2] * 4, calls


if __name__ == "__main__":
    main(Path(sys.argv[1]))
