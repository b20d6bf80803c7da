"""Inline PTX for Triton's interpreter: instructions on arrays that have one element for each thread of a program.

The interpreter runs a program for all of its threads at once and instruction by instruction, so barriers have nothing
to do and a missing one is not found. What it finds are wrong layouts, addresses, masks and arithmetic.

Registers are arrays of 32 bits (addresses in global memory of 64); products are those of the PTX manual (layouts under
*Matrix multiply-accumulate*), in which tf32 has 11 bits and what is cut off is lost. Shared memory is filled with NaN.
"""

from __future__ import annotations

import re
from types import SimpleNamespace

import numpy as np

LANE = np.arange(32)
SHARED_BYTES = 48 * 1024
"""The bytes of shared memory that a kernel may declare statically."""


def _bits(x):
    return x.view(np.uint32) if x.itemsize == 4 else x.astype(np.uint64).astype(np.uint32)


def _float(x):
    return _bits(x).view(np.float32)


def _warps(x):
    return x.reshape(-1, 32)


def _bfloat16(x, half):
    """The lower (0) or upper (1) bfloat16 of each word, as float32."""
    return (_bits(x) << np.uint32(16) if half == 0 else _bits(x) & np.uint32(0xFFFF0000)).view(np.float32)


def _round_to_bfloat16(x):
    wide = _bits(x).astype(np.uint64)
    return ((wide + 0x7FFF + (wide >> 16 & 1)) >> 16).astype(np.uint32)


class Thread:
    """The threads of a program: executes statements of PTX on registers, which are found by name."""

    def __init__(self, size, shared, registers):
        self.size, self.shared, self.registers = size, shared, registers
        self.where = np.ones(size, bool)

    def read(self, name):
        if name in self.registers:
            return self.registers[name]
        if name in self.shared.names:
            return np.full(self.size, self.shared.names[name], np.uint32)
        number = int(name[2:], 16) if name.startswith("0f") else int(name, 0)
        return np.full(self.size, number & 0xFFFFFFFF, np.uint32)

    def address(self, text):
        base, _, offset = text.strip("[]").partition("+")
        return self.read(base).astype(np.int64) + int(offset or 0)

    def execute(self, statement):
        if not statement or statement.startswith(".reg"):
            return
        if declared := re.fullmatch(r"\.shared \.align \d+ \.b8 (\w+)\[(\d+)\]", statement):
            self.shared.declare(declared[1], int(declared[2]))
            return
        self.where = np.ones(self.size, bool)
        if guarded := re.match(r"@(\w+)\s+", statement):
            self.where, statement = self.read(guarded[1]).astype(bool), statement[guarded.end() :]
        name, _, rest = statement.partition(" ")
        operands = [part.strip() for part in re.findall(r"\{[^}]*\}|\[[^]]*\]|[^,\s][^,]*", rest)]
        kind = next((kind for kind in OPERATIONS if name.startswith(kind)), None)
        if kind is None:
            raise NotImplementedError(statement)
        OPERATIONS[kind](self, name, operands)

    def group(self, operand):
        return [name.strip() for name in operand.strip("{}").split(",")]

    def put(self, operand, values):
        for name, value in zip(self.group(operand), values, strict=True):
            self.registers[name] = value

    def put_one(self, operand, value):
        self.put(operand, [value])


class Shared:
    """Shared memory of a program, and the addresses of its variables."""

    def __init__(self):
        self.names, self.used = {}, 0
        self.memory = np.full(SHARED_BYTES, 0xFF, np.uint8)

    def declare(self, name, size):
        if name not in self.names:
            self.names[name] = self.used
            self.used += -(-size // 16) * 16
            assert self.used <= SHARED_BYTES

    def words(self, address, count):
        """The indices of so many words at each address, which has to be a multiple of their bytes."""
        assert (address % (4 * count) == 0).all()
        assert (address >= 0).all()
        assert (address + 4 * count <= self.used).all()
        return address[:, None] // 4 + np.arange(count)


def _width(name):
    return 4 if ".v4" in name else 2 if ".v2" in name else 1


def _element(name):
    return np.dtype(np.uint16 if name.endswith("b16") else np.uint32)


def _load_global(address, count, dtype, where):
    from triton._C.libtriton import interpreter

    assert (address[where] % (dtype.itemsize * count) == 0).all()
    places = [(address + dtype.itemsize * i).astype(np.uint64) for i in range(count)]
    return [interpreter.load(place, where, np.zeros(place.shape, dtype), dtype) for place in places]


def _store_global(address, values, where):
    from triton._C.libtriton import interpreter

    for i, value in enumerate(values):
        interpreter.store((address + value.itemsize * i).astype(np.uint64), np.ascontiguousarray(value), where)


def _load(threads, name, operands):
    address, count = threads.address(operands[1]), _width(name)
    if "shared" in name:
        words = threads.shared.words(address, count)
        threads.put(operands[0], list(threads.shared.memory.view(np.uint32)[words].T))
    else:
        threads.put(operands[0], _load_global(address, count, _element(name), threads.where))


def _store(threads, name, operands):
    address, values = threads.address(operands[0]), [threads.read(part) for part in threads.group(operands[1])]
    if "shared" in name:
        words = threads.shared.words(address, len(values))
        threads.shared.memory.view(np.uint32)[words] = np.stack([_bits(value) for value in values], 1)
    else:
        _store_global(address, [value.astype(_element(name)) for value in values], threads.where)


def _copy(threads, name, operands):
    """cp.async, at once: a copy that is read before it was waited for is not found."""
    if not operands or len(operands) < 3:
        return
    count = int(operands[2]) // 4
    values = _load_global(threads.address(operands[1]), count, np.dtype(np.uint32), threads.where)
    words = threads.shared.words(threads.address(operands[0]), count)
    threads.shared.memory.view(np.uint32)[words] = np.stack(values, 1)


def _add_global(threads, name, operands):
    address = threads.address(operands[0])
    (before,) = _load_global(address, 1, np.dtype(np.uint32), threads.where)
    _store_global(address, [_bits(_float(before) + _float(threads.read(operands[1])))], threads.where)


def _shuffle(threads, name, operands):
    values, other = _warps(_bits(threads.read(operands[1]))), _warps(_bits(threads.read(operands[2])))
    if ".bfly" in name:
        source = LANE ^ other.astype(np.int64)
    else:
        keep = int(_bits(threads.read(operands[3]))[0]) >> 8 & 31
        source = (LANE & keep) | (other.astype(np.int64) & ~keep & 31)
    threads.put_one(operands[0], np.take_along_axis(values, source, 1).reshape(-1))


def _multiply_matrices(threads, name, operands):
    """m16n8k8: lane 4 g + t has of A the rows g and g + 8, of B the column g, of C the columns 2 t and 2 t + 1."""
    g, t = LANE // 4, LANE % 4
    left, right, added = ([threads.read(part) for part in threads.group(x)] for x in operands[1:4])
    num_warps = threads.size // 32
    a, b, c = (np.zeros((num_warps, *shape), np.float32) for shape in ((16, 8), (8, 8), (16, 8)))
    if "tf32" in name:
        parts = [_warps((_bits(x) & np.uint32(0xFFFFE000)).view(np.float32)) for x in (*left, *right)]
        a[:, g, t], a[:, g + 8, t], a[:, g, t + 4], a[:, g + 8, t + 4], b[:, t, g], b[:, t + 4, g] = parts
    else:
        for half in range(2):
            a[:, g, 2 * t + half], a[:, g + 8, 2 * t + half] = (_warps(_bfloat16(x, half)) for x in left)
            b[:, 2 * t + half, g] = _warps(_bfloat16(right[0], half))
    places = ((g, 2 * t), (g, 2 * t + 1), (g + 8, 2 * t), (g + 8, 2 * t + 1))
    for (row, column), x in zip(places, added, strict=True):
        c[:, row, column] = _warps(_float(x))
    c += a @ b
    threads.put(operands[0], [_bits(np.ascontiguousarray(c[:, row, column]).reshape(-1)) for row, column in places])


def _load_transposed(threads, name, operands):
    """ldmatrix.x4.trans: lane e gives the address of row e % 8 of matrix e // 8."""
    rows = _warps(threads.address(operands[1]))
    halves = threads.shared.memory.view(np.uint16).astype(np.uint32)
    found = []
    for i in range(4):
        matrix = halves[rows[:, 8 * i : 8 * i + 8, None] // 2 + np.arange(8)]
        low, high = matrix[:, 2 * (LANE % 4), LANE // 4], matrix[:, 2 * (LANE % 4) + 1, LANE // 4]
        found.append((low | high << np.uint32(16)).reshape(-1))
    threads.put(operands[0], found)


def _two_terms(operation):
    def execute(threads, name, operands):
        values = [_bits(threads.read(part)) for part in operands[1:]]
        threads.put_one(operands[0], operation(*values))

    return execute


def _widening(threads, name, operands):
    left, right, added = (threads.read(part) for part in operands[1:])
    product = _bits(left).view(np.int32).astype(np.int64) * _bits(right).view(np.int32)
    threads.put_one(operands[0], product + added.astype(np.int64))


def _compare(threads, name, operands):
    left, right = (_bits(threads.read(part)) for part in operands[1:3])
    found = left == right if ".eq" in name else left != right
    threads.put_one(operands[0], found & threads.read(operands[3]).astype(bool) if ".and" in name else found)


def _nothing(threads, name, operands):
    pass


OPERATIONS = {
    "mov.": lambda threads, name, operands: threads.put_one(operands[0], threads.read(operands[1])),
    "bar.": _nothing,
    "ldmatrix.": _load_transposed,
    "ld.": _load,
    "st.": _store,
    "cp.async": _copy,
    "red.global.add.f32": _add_global,
    "shfl.sync": _shuffle,
    "mma.sync": _multiply_matrices,
    "mad.wide.s32": _widening,
    "mad.lo.u32": _two_terms(lambda a, b, c: a * b + c),
    "shr.u32": _two_terms(lambda a, b: a >> b),
    "and.b32": _two_terms(lambda a, b: a & b),
    "xor.b32": _two_terms(lambda a, b: a ^ b),
    "rem.u32": _two_terms(lambda a, b: a % b),
    "bfe.u32": _two_terms(lambda a, start, length: a >> start & (np.uint32(1) << length) - np.uint32(1)),
    "add.f32": _two_terms(lambda a, b: _bits(_float(a) + _float(b))),
    "cvt.rn.bf16x2.f32": _two_terms(lambda a, b: _round_to_bfloat16(a) << np.uint32(16) | _round_to_bfloat16(b)),
    "setp.": _compare,
}
"""Instructions by the beginning of their names."""

LETTERS = {"f": np.uint32, "r": np.uint32, "l": np.int64, "h": np.uint16}


def install(monkeypatch):
    """Lets the interpreter execute inline PTX, in programs that one launch after the other runs one by one."""
    import triton.language as tl
    from triton.runtime import interpreter

    shared = Shared()
    types = {"f": (np.float32, tl.float32), "r": (np.int32, tl.int32), "l": (np.int64, tl.int64)}
    types["h"] = (np.int16, tl.int16)

    def create_inline_asm(builder, text, constraints, values, *_):
        letters = [part.strip("=&") for part in constraints.split(",")]
        num_outputs = len(letters) - len(values)
        size = np.asarray(values[0].data).size
        registers = {}
        for i, value in enumerate(values, num_outputs):
            data = np.ascontiguousarray(np.broadcast_to(np.asarray(value.data).reshape(-1), (size,)))
            registers[f"${i}"] = data.view(f"u{data.itemsize}").astype(LETTERS[letters[i]])
        threads = Thread(size, shared, registers)
        # a block has braces of its own; those of a group of registers stay
        body = re.sub(r"^\s*\{\s|\}\s*$", "", text)
        for statement in body.split(";"):
            threads.execute(statement.strip())
        results = []
        for i in range(num_outputs):
            numpy_type, triton_type = types[letters[i]]
            data = np.ascontiguousarray(registers[f"${i}"].astype(LETTERS[letters[i]])).view(numpy_type)
            results.append(interpreter.TensorHandle(data, triton_type))
        return SimpleNamespace(get_result=lambda i: results[i])

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_inline_asm", create_inline_asm)
    # the interpreter does not add Triton's tuples, which several results are, to those of Python
    several = tl.core.tuple
    monkeypatch.setattr(several, "__add__", lambda left, right: (*left, *right))
    monkeypatch.setattr(several, "__radd__", lambda right, left: (*left, *right), raising=False)
