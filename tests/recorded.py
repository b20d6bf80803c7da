"""Triton's interpreter repeats the operations on arrays that a function of a kernel made, without their Python.

The interpreter calls a kernel once for each program, and for the small arrays of tests the types of Triton's language
take ten times as long as NumPy. Which operations a function makes follows from the types of its arguments, from the
values of its constexprs, and from the values by which it branches. So the first call of each kind is recorded, and
later ones repeat its operations on their own arrays. Where a value takes another branch than before, the function is
interpreted again, without what happens once, such as a store, and its new path is added.

The results have the same bits. All values of a kernel are in `TensorHandle.data`, so a function that reads it in a way
that is not recorded is found out, and is always interpreted.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from operator import itemgetter, methodcaller
from typing import Any

import numpy as np
from triton.language import constexpr, dtype, tensor
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder, TensorHandle

Slots = tuple[int, ...]
Take = Callable[[list[Any]], Any]

recording: Recording | None = None
"""What is recorded now."""
known: dict[Hashable, Repeated] = {}
"""What was recorded, by function and kind of arguments."""

ONCE = "load", "store", "atomic", "assert", "assume", "barrier"
"""Words in the names of operations that are not carried out again where a function is interpreted again."""
UNKNOWN = "descriptor", "print", "inline_asm", "extern"
"""Words in the names of operations that are not recorded."""
HOLE = object()
"""A tensor's place in arguments and results that are kept."""


def repeat_what_was_recorded() -> None:
    """Change the interpreter of Triton 3.9."""
    TensorHandle.recording = None
    TensorHandle.__init__ = _initialize
    TensorHandle.data = property(_read, lambda handle, data: setattr(handle, "_data", data))
    for name in dir(InterpreterBuilder):
        method = getattr(InterpreterBuilder, name)
        names = getattr(getattr(method, "__code__", None), "co_names", ())
        # most operations only name a function of NumPy for one of these, which is what is recorded
        named = name.startswith("create_") and not (method.__name__ == "<lambda>" and general.intersection(names))
        if named or name in general:
            setattr(InterpreterBuilder, name, _recorded(name, method))
    interface = interpreter.ReduceScanOpInterface
    interface.apply = _recorded_reduction(interface.apply)
    interpreter._patch_lang_tensor = _with_questions(interpreter._patch_lang_tensor)
    InterpretedFunction.__call__ = _recorded_call(InterpretedFunction.__call__)
    interpreter.GridExecutor.__call__ = _launch


general = {"binary_op", "unary_op", "ternary_op", "cast_impl", "create_idiv"}


def forget() -> None:
    """Forget what was recorded, since a test may replace what a kernel calls."""
    known.clear()


class Path:
    """Operations until a value decides how a function goes on, or until its end.

    steps:     a function each, and what takes its arguments from the list of values, to which its result is appended.
    slots:     where the arguments of each are in that list.
    once:      where the results are of what happens once, and their dtypes.
    question:  the function of a value, and its place, that decides which of the paths in `answers` comes next.
    result:    what the function returned, and the dtypes and types of the tensors in it, whose arrays `outputs` takes.
    """

    def __init__(self) -> None:
        self.steps: list[tuple[Callable[..., Any], Take]] = []
        self.slots: list[Slots] = []
        self.once: list[tuple[int, Any]] = []
        self.question: tuple[Callable[[Any], Hashable], int] | None = None
        self.answers: dict[Hashable, Path] = {}
        self.result: Any = None
        self.types: list[tuple[Any, Any]] = []
        self.outputs = _take(())


def _take(slots: Slots) -> Take:
    if len(slots) > 1:
        return itemgetter(*slots)
    return itemgetter(slice(slots[0], slots[0] + 1) if slots else slice(0))


class Repeated:
    """A function of a kernel for arguments of one kind: gives the end of its path and the arrays of its results.

    call: the function of an iterator of tensors.   types: the dtypes and types of the tensors.
    """

    def __init__(self, call: Callable[[Iterator[tensor]], Any], types: list[tuple[Any, Any]]) -> None:
        self.call, self.types, self.hopeless = call, types, False
        self.start: Path | None = None

    def __call__(self, *arrays: np.ndarray) -> tuple[Any, ...]:
        values: list[Any] = list(arrays)
        path, found = self.start, []
        while path:
            append = values.append
            for function, arguments in path.steps:
                append(function(*arguments(values)))
            if path.question is None:
                return (path, *path.outputs(values))
            found += [(values[slot], kind) for slot, kind in path.once]
            function, slot = path.question
            path = path.answers.get(function(values[slot]))
        return self._interpret(arrays, found)

    def _interpret(self, arrays: tuple[np.ndarray, ...], found: list[tuple[Any, Any]]) -> tuple[Any, ...]:
        """found: results of what has happened once already."""
        global recording
        outputs: list[tensor] = []
        outer, recording = recording, Recording(len(arrays), found)
        try:
            now = recording
            inputs = [now.handle(x, kind, i) for i, (x, (kind, _)) in enumerate(zip(arrays, self.types, strict=True))]
            result = self.call(tensor(x, type) for x, (_, type) in zip(inputs, self.types, strict=True))
        finally:
            recording = outer
        end = now.path
        try:
            _kind(result, outputs)
        except Unknown:
            now.broken = True
        slots = tuple(now.slot(x.handle) for x in outputs)
        end.types = [(x.handle.dtype, x.type) for x in outputs]
        end.result, end.outputs = _filled(result, itertools.repeat(HOLE)), _take(slots)
        self.hopeless |= now.broken
        if not now.broken:
            self._add(now)
        return (end, *[x.handle._data for x in outputs])

    def _add(self, now: Recording) -> None:
        path = self.start
        for new, answer in now.answers:
            # the first time, an operation may take other steps than later on
            if path is None or path.slots != new.slots:
                break
            if answer not in path.answers:
                path.answers[answer] = new.answers[answer]
                return
            path = path.answers[answer]
        self.start = now.start


class Recording:
    """The steps of a function that is interpreted now."""

    def __init__(self, count: int, found: list[tuple[Any, Any]]) -> None:
        self.count, self.found, self.broken = count, deque(found), False
        self.start = self.path = Path()
        self.answers: list[tuple[Path, Hashable]] = []
        self.constants: dict[int, tuple[TensorHandle, int]] = {}

    def handle(self, data: np.ndarray, kind: Any, slot: int) -> TensorHandle:
        handle = TensorHandle(data, kind)
        handle.recording, handle.slot = self, slot
        return handle

    def slot(self, handle: TensorHandle) -> int:
        if handle.recording is self:
            return handle.slot
        self.broken |= handle.recording is not None
        if id(handle) not in self.constants:
            # the handle is kept, so that no other one gets its id
            self.constants[id(handle)] = handle, self.step(itertools.repeat(handle._data).__next__, ())
        return self.constants[id(handle)][1]

    def step(self, function: Callable[..., Any], slots: Slots) -> int:
        self.path.steps.append((function, _take(slots)))
        self.path.slots.append(slots)
        self.count += 1
        return self.count - 1

    def step_once(self, function: Callable[..., Any], slots: Slots, make: Callable[[], tuple[Any, Any]]) -> Any:
        """A step whose result and dtype `make` gives, unless they were found already; gives its place as well."""
        value, kind = self.found.popleft() if self.found else make()
        slot = self.step(function, slots)
        self.path.once.append((slot, kind))
        return value, kind, slot

    def ask(self, function: Callable[[Any], Hashable], value: Any, slot: int) -> Any:
        answer = function(value)
        self.path.question = function, slot
        self.answers.append((self.path, answer))
        self.path.answers[answer] = self.path = Path()
        return answer


def _initialize(handle: TensorHandle, data: np.ndarray, kind: Any) -> None:
    handle._data, handle.dtype, handle.attr = data, kind, {}


def _read(handle: TensorHandle) -> np.ndarray:
    if recording is not None and handle.recording is not None:
        recording.broken = True
    return handle._data


def _recorded(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """An operation of the interpreter that is recorded."""
    unknown, once = (any(word in name for word in words) for words in (UNKNOWN, ONCE))
    constant = not once and "program" not in name
    form = FORMS.get(name)

    def call(builder: InterpreterBuilder, *args: Any) -> Any:
        global recording
        now, recording = recording, None
        try:
            if now is None:
                return method(builder, *args)
            places = [i for i, x in enumerate(args) if type(x) is TensorHandle]
            if unknown or (constant and all(args[i].recording is None for i in places)):
                now.broken |= unknown
                return method(builder, *args)
            slots = tuple(now.slot(args[i]) for i in places)

            def made() -> tuple[Any, Any]:
                result = method(builder, *args)
                if isinstance(result, tuple):
                    return tuple(x._data for x in result), tuple(x.dtype for x in result)
                return (None, None) if result is None else (result._data, result.dtype)

            if once:
                function = form(None, *args) if form else _again(method, builder, args, places)
                value, kind, slot = now.step_once(function, slots, made)
            else:
                value, kind = made()
                function = form and form(value.dtype, *args)
                slot = now.step(function or _again(method, builder, args, places), slots)
            if isinstance(kind, tuple):
                parts = enumerate(zip(value, kind, strict=True))
                return tuple(now.handle(x, k, now.step(itemgetter(i), (slot,))) for i, (x, k) in parts)
            return None if value is None else now.handle(value, kind, slot)
        finally:
            recording = now

    return call


def _again(
    method: Callable[..., Any], builder: InterpreterBuilder, args: tuple[Any, ...], places: list[int]
) -> Callable[..., Any]:
    """The operation as a function of arrays."""
    kinds = [(i, args[i].dtype) for i in places]
    others = [None if i in places else x for i, x in enumerate(args)]

    def function(*arrays: np.ndarray) -> Any:
        given = others.copy()
        for x, (i, kind) in zip(arrays, kinds, strict=True):
            given[i] = TensorHandle(x, kind)
        result = method(builder, *given)
        return tuple(x._data for x in result) if isinstance(result, tuple) else getattr(result, "_data", None)

    return function


def _elementwise(made: np.dtype, *args: Any) -> Callable[..., Any] | None:
    *operands, operation = args
    kinds = [x._data.dtype for x in operands]
    # Triton takes a bit for a number
    return None if set(kinds) == {np.dtype(bool)} else _to(operation, made, *kinds)


@functools.cache
def _to(operation: Callable[..., Any], made: np.dtype, *kinds: np.dtype) -> Callable[..., Any]:
    """The operation on arrays of these dtypes, with a result of another one."""
    if operation(*[np.ones(1, kind) for kind in kinds]).dtype == made:
        return operation
    return lambda *arrays: operation(*arrays).astype(made)


def _cast(made: np.dtype, source: TensorHandle, target: Any) -> Callable[..., Any] | None:
    if "bf16" in (source.dtype.scalar.name, target.scalar.name) or "fp8" in target.scalar.name:
        return None
    return methodcaller("astype", made)


def _spread(made: np.dtype, shape: tuple[int, ...]) -> Callable[..., Any]:
    def function(x: np.ndarray) -> np.ndarray:
        y = np.empty(shape, made)
        y[...] = x
        return y

    return function


def _add_pointer(made: np.dtype, pointer: TensorHandle, offset: TensorHandle) -> Callable[..., Any]:
    width = np.uint64(max(1, pointer.get_element_ty().primitive_bitwidth // 8))
    return lambda x, y: x + width * y.astype(np.uint64)


def _load(made: Any, pointer: TensorHandle, mask: TensorHandle | None, other: Any, *options: Any) -> Callable[..., Any]:
    kind = interpreter._get_np_dtype(pointer.get_element_ty())
    load = interpreter._interpreter.load
    if other is not None:
        return lambda x, m, y: load(x, m, y, kind)
    if mask is None:
        return lambda x: load(x, np.ones(x.shape, bool), np.zeros(x.shape, kind), kind)
    return lambda x, m: load(x, m, np.zeros(x.shape, kind), kind)


FORMS: dict[str, Callable[..., Callable[..., Any] | None]] = {
    "binary_op": _elementwise,
    "unary_op": lambda made, x, operation: operation,
    "ternary_op": _elementwise,
    "cast_impl": _cast,
    "create_addptr": _add_pointer,
    # a view, since sums follow the order of memory
    "create_broadcast": lambda made, x, shape: lambda x: np.broadcast_to(x, shape),
    "create_idiv": lambda made, x, y: lambda a, b: (a - np.fmod(a, b)) // b,
    "create_load": lambda made, x, *options: _load(made, x, None, None),
    "create_masked_load": _load,
    "create_masked_store": lambda made, *args: interpreter._interpreter.store,
    "create_reshape": lambda made, x, shape, *options: methodcaller("reshape", tuple(shape)),
    "create_splat": lambda made, type, x: _spread(made, tuple(type.shape)),
    "create_trans": lambda made, x, perm: methodcaller("transpose", tuple(perm)),
}
"""Operations as functions of arrays; None is for those that are called again as they are."""


def _recorded_reduction(apply: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, inputs: Any) -> Any:
        global recording
        if not isinstance(inputs, tuple):
            return call(self, (inputs,))[0]
        now, recording = recording, None
        try:
            results = apply(self, inputs)
            if now is None or all(x.handle.recording is None for x in inputs):
                return results
            types = [(x.handle.dtype, x.type) for x in inputs]

            def function(*arrays: np.ndarray) -> tuple[np.ndarray, ...]:
                given = tuple(tensor(TensorHandle(x, k), t) for x, (k, t) in zip(arrays, types, strict=True))
                return tuple(x.handle._data for x in apply(self, given))

            slot = now.step(function, tuple(now.slot(x.handle) for x in inputs))
            return _outputs(now, slot, 0, [(x.handle._data, x.handle.dtype, x.type) for x in results])
        finally:
            recording = now

    return call


def _outputs(now: Recording, slot: int, first: int, results: list[tuple[np.ndarray, Any, Any]]) -> tuple[tensor, ...]:
    """Tensors of the arrays that are in the tuple at this place."""
    steps = (now.step(itemgetter(i), (slot,)) for i in itertools.count(first))
    return tuple(tensor(now.handle(x, kind, i), type) for (x, kind, type), i in zip(results, steps, strict=False))


def _with_questions(patch: Callable[..., None]) -> Callable[..., None]:
    def ask(function: Callable[[np.ndarray], Any], self: tensor) -> Any:
        handle = self.handle
        if recording is None or handle.recording is None:
            return function(handle._data)
        return recording.ask(function, handle._data, recording.slot(handle))

    def number(data: np.ndarray) -> int:
        return int(data.squeeze())

    def truth(data: np.ndarray) -> bool:
        return bool(data) if data.size == 1 else True

    def patched(kind: Any, scope: Any) -> None:
        patch(kind, scope)
        scope.set_attr(kind, "__index__", lambda self: ask(number, self))
        scope.set_attr(kind, "__bool__", lambda self: ask(truth, self))

    return patched


class Unknown(Exception):
    """Arguments by which no call is known again."""


def _kind(x: Any, found: list[tensor]) -> Hashable:
    """What a function may know of an argument; the tensors in it are appended to `found`."""
    if type(x) is tensor:
        found.append(x)
        return x.type.name, x.handle._data.shape
    if type(x) is tuple:
        return tuple(_kind(y, found) for y in x)
    if type(x) is constexpr:
        return constexpr, _kind(x.value, found)
    if isinstance(x, dtype):
        return dtype, x.name
    if x is None or isinstance(x, bool | int | float | str):
        # not the number itself, since 1 equals True, and 0.0 equals -0.0
        return type(x), repr(x)
    if isinstance(x, InterpretedFunction):
        return x
    raise Unknown


def _filled(x: Any, tensors: Iterator[Any]) -> Any:
    """An argument or result with these tensors in place of its own."""
    if type(x) is tensor or x is HOLE:
        return next(tensors)
    if type(x) is constexpr:
        # the product of a constexpr and a tensor is one, too
        return constexpr(_filled(x.value, tensors))
    return tuple(_filled(y, tensors) for y in x) if type(x) is tuple else x


def _find(function: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Repeated, list[tensor]]:
    given = args, tuple(named.values())
    tensors: list[tensor] = []
    key = function, tuple(named), _kind(given, tensors)
    if key not in known:
        names, holes = tuple(named), _filled(given, itertools.repeat(HOLE))

        def call(tensors: Iterator[tensor]) -> Any:
            args, values = _filled(holes, tensors)
            return function(*args, **dict(zip(names, values, strict=True)))

        known[key] = Repeated(call, [(x.handle.dtype, x.type) for x in tensors])
    return known[key], tensors


def _recorded_call(plain: Callable[..., Any]) -> Callable[..., Any]:
    """A call of a function of a kernel by another one, as one step."""

    def call(self: InterpretedFunction, *args: Any, **named: Any) -> Any:
        global recording
        now = recording
        if now is None:
            return plain(self, *args, **named)
        interpreter._patch_lang(self.fn)
        try:
            repeated, tensors = _find(self.rewrite(), args, named)
        except Unknown:
            return plain(self, *args, **named)
        if repeated.hopeless:
            return plain(self, *args, **named)
        handles = [x.handle for x in tensors]
        slots = tuple(map(now.slot, handles))
        recording = None
        try:
            value, _, slot = now.step_once(repeated, slots, lambda: (repeated(*[x._data for x in handles]), None))
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error
        finally:
            recording = now
        now.broken |= repeated.hopeless
        end, *arrays = value
        if repeated.start and repeated.start.question:
            now.ask(itemgetter(0), value, slot)
        outputs = _outputs(now, slot, 1, [(x, *types) for x, types in zip(arrays, end.types, strict=True)])
        return _filled(end.result, iter(outputs))

    return call


def _launch(self: Any, *args: Any, **named: Any) -> None:
    """Carry out all programs of a kernel, as `GridExecutor` does."""
    named = {name: x for name, x in named.items() if name in self.arg_names}
    args_here, named_here = self._init_args_hst(args, named)
    for hook in self.pre_run_hooks:
        hook(*args_here, **named_here)
    scope = interpreter._patch_lang(self.fn)
    try:
        given = inspect.getcallargs(self.fn, *args_here, **named_here)
        given = {name: x if name in self.constexprs else interpreter._implicit_cvt(x) for name, x in given.items()}
        grid = self.grid(given) if callable(self.grid) else self.grid
        grid = (*grid, 1, 1)[:3]
        builder = interpreter.interpreter_builder
        builder.set_grid_dim(*grid)
        try:
            try:
                repeated, tensors = _find(self.fn, (), given)
            except Unknown:
                repeated = None
            for place in itertools.product(*map(range, grid)):
                builder.set_grid_idx(*place)
                if repeated is None or repeated.hopeless:
                    self.fn(**given)
                else:
                    repeated(*[x.handle._data for x in tensors])
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error
    finally:
        scope.restore()
    self._restore_args_dev(args, args_here, named, named_here)
