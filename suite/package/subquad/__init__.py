"""Subquad under one name: `from subquad import load, results, run`, `from subquad.kernels.norm import norm`.

The folders `suite`, `tasks`, `models`, `kernels` and `reports` are subpackages of this one. In a wheel they lie beside
this file. In a checkout they lie at its top level, which must not be on the import path, because other packages have
modules of these names. This package therefore lies in a folder of its own, `suite/package`, which is put on the path.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

__all__ = ["load", "results", "run"]

_HERE = Path(__file__).resolve().parent
if not (_HERE / "suite").is_dir():
    __path__ = [str(_HERE.parents[2]), str(_HERE)]

if TYPE_CHECKING:
    from subquad.run_suite import load, results, run
else:
    # a type checker that saw this function would believe that there is every name

    def __getattr__(name: str) -> Any:
        """The functions for Python (`suite/notebook.py`), whose module takes a second to import."""
        if name in __all__:
            from subquad import run_suite

            return getattr(run_suite, name)
        raise AttributeError(f"module 'subquad' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
