"""Options, and how they are read: the base class of all options, strict numbers, safe YAML, and what a user types.

Every fault is one line that says where it stands. Numbers are finite, `true` and `false` are none, and `1e3` is the
integer 1000.
"""

from __future__ import annotations

import functools
import math
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar, get_args

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from subquad.suite.registry import nearest


def check_finite(value: Any, where: str) -> None:
    """Raises ValueError, beginning with `where`, if NaN or infinity stands anywhere in a tree of settings."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{where}expected a finite number, got {value}")
    for key, part in _parts(value):
        check_finite(part, f"{where}{key}: ")


def _parts(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, (list, tuple)):
        yield from enumerate(value)


@dataclass(frozen=True)
class Wanted:
    """Kinds of values that the type of an option allows, at any depth of a container."""

    anything: bool
    """Whether any value is allowed, because the type is Any or contains a model, which checks its own options."""
    number: bool
    boolean: bool
    integer: bool
    """Whether integers are allowed, and text, which could be mistaken for one, is not."""


@functools.cache
def wanted_by(cls: type[BaseModel], field: str) -> Wanted:
    """Kinds of values that one option of a pydantic model allows; of a name that is no option, whatever is finite."""
    option = cls.model_fields.get(field)
    leaves = [Any] if option is None else list(_leaves(option.annotation))
    types = [leaf if isinstance(leaf, type) else type(leaf) for leaf in leaves]
    return Wanted(
        anything=Any in leaves or any(issubclass(kind, BaseModel) for kind in types),
        number=int in types or float in types,
        boolean=bool in types,
        integer=int in types and str not in leaves,
    )


def _leaves(annotation: Any) -> Iterator[Any]:
    """The types, and the values of a Literal, that an annotation is composed of."""
    inner = get_args(annotation)
    for part in inner:
        yield from _leaves(part)
    if not inner:
        yield annotation


def strict(value: Any, wanted: Wanted, where: str = "") -> Any:
    """The value, with integers such as `1e3` that were read as text converted.

    ValueError for NaN, infinity, and `true` or `false` in place of a number.
    """
    kind = type(value)
    if kind is int or (kind is float and math.isfinite(value)):
        # most options are given such a value, which needs none of the checks below
        return value
    check_finite(value, where)
    if wanted.anything:
        return value
    if isinstance(value, bool) and wanted.number and not wanted.boolean:
        raise ValueError(f"{where}expected a number, got {str(value).lower()}")
    if isinstance(value, str) and wanted.integer:
        try:
            number = float(value)
        except ValueError:
            return value
        return int(number) if number.is_integer() and "e" in value.lower() else value
    if isinstance(value, Mapping):
        return {key: strict(part, wanted, f"{where}{key}: ") for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict(part, wanted, f"{where}{index}: ") for index, part in enumerate(value)]
    return value


C = TypeVar("C", bound="Config")


class Config(BaseModel):
    """A frozen, strict set of options. An unknown key is an error, never ignored.

    Every number is finite, because NaN and infinity have no JSON and so no identity. `true` and `false` are not
    numbers. A whole number may be written in any way that YAML has for it: `1000`, `1.0e3` or `1e3`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    left_out_when_off: ClassVar[tuple[str, ...]] = ()
    """Options that are not written where they are off or, if their values are words, have their default. A run without
    them keeps the id that it had before there was such an option."""

    @model_validator(mode="before")
    @classmethod
    def _strict_numbers(cls, values: Any) -> Any:
        # one call for all options that are given: a validator of every field would take most of a grid's planning
        if not isinstance(values, dict):
            return values
        checked = {}
        for key, value in values.items():
            try:
                checked[key] = strict(value, wanted_by(cls, key))
            except ValueError as error:
                # an error that names the option, as that of a validator of this option would
                reason = PydanticCustomError("value_error", "{reason}", {"reason": str(error)})
                details = InitErrorDetails(type=reason, loc=(key,), input=value)
                raise ValidationError.from_exception_data(cls.__name__, [details]) from None
        return checked

    def check_options(self) -> None:
        """Raises ValueError where the values of several options do not go together; a subclass overrides it."""

    @model_validator(mode="after")
    def _go_together(self: C) -> C:
        self.check_options()
        return self

    @model_serializer(mode="wrap")
    def _without_what_is_off(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        values, off = handler(self), self._off()
        return {key: value for key, value in values.items() if key not in off or (value and value != off[key])}

    @classmethod
    @functools.cache
    def _off(cls) -> dict[str, Any]:
        # an option that is on by default is written when it is off, so that settings are read back as they were
        defaults = {key: cls.model_fields[key].default for key in cls.left_out_when_off}
        return {key: default for key, default in defaults.items() if default is not True}


MOST_SEEDS = 100_000
T = TypeVar("T")


class _Loader(yaml.SafeLoader):
    """The safe loader with the plain scalars of YAML 1.2's core schema, where the library has those of YAML 1.1.

    `1e3` is a number, `010` is 10, and `yes`, `1:30`, `1_000` and `2026-11-28` are words.
    """


class _FastLoader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """The same with the parser of libyaml, where PyYAML was built with it. It takes a seventh of the time."""


_TAG = "tag:yaml.org,2002:"
_SCALARS = {
    # section 10.3.2 of YAML 1.2.2, and where such a scalar begins; what begins with none of these is a word
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "bool": (r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    "int": (r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    "float": (
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
}


def _integer(loader: Any, node: yaml.ScalarNode) -> int:
    text = loader.construct_scalar(node)
    if text[:2] in ("0o", "0x"):
        return int(text[2:], 8 if text[1] == "o" else 16)
    return int(text)


for _loader in (_Loader, _FastLoader):
    # a merge key belongs to no schema of YAML 1.2, but the library has a way of its own to write it
    _loader.yaml_implicit_resolvers = {"<": list(yaml.SafeLoader.yaml_implicit_resolvers["<"])}
    for _name, (_pattern, _begins) in _SCALARS.items():
        _loader.add_implicit_resolver(_TAG + _name, re.compile(rf"(?:{_pattern})\Z"), _begins)
    _loader.add_constructor(_TAG + "int", _integer)


MAX_VALUES = 100_000
"""Values of a YAML text, with those of every alias counted again. Our largest grid has some hundreds."""
MAX_DEPTH = 5_000
"""Nesting up to which the parser of libyaml is used. It recurses in C, which some tens of thousands of levels crash."""


def _most_depth(text: str) -> int:
    """A bound on how deeply a YAML text is nested, found without parsing it.

    A collection in brackets needs one of them. Any other begins in a column behind that of the collection it is in,
    or in the same column where it is a list in a mapping, so a line of n characters opens at most 2n of them.
    """
    return text.count("[") + text.count("{") + 2 * max(map(len, text.splitlines()), default=0)


def read_yaml(text: str) -> Any:
    """The value that a YAML text stands for. Raises yaml.YAMLError, also for a key that a mapping has twice."""
    try:
        loader = _FastLoader(text) if _most_depth(text) <= MAX_DEPTH else _Loader(text)
        root = loader.get_single_node()
        if root is None:
            return None
        if _count(root, {}) > MAX_VALUES:
            raise yaml.YAMLError(f"it stands for more than {MAX_VALUES} values, most of them by aliases")
        return loader.construct_document(root)
    except RecursionError:
        raise yaml.YAMLError("it is nested too deeply") from None
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        # the library raises these for too many digits, a date that does not exist, a tag for another kind of value
        raise yaml.YAMLError(f"a value cannot be read ({error})") from None


def read_yaml_file(path: Path) -> Any:
    """The value in a YAML file. ValueError, in one line that begins with its path, for what is none."""
    try:
        return read_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        words = " ".join(str(error).split()).replace(' in "<unicode string>", line', " in line")
        # the library does not name the character
        tabs = "; lines are indented by spaces, and no value begins with a tab, @, % or a backtick"
        tabs *= "cannot start any token" in words
        raise ValueError(f"{path}: not valid YAML: {words}{tabs}") from None


def _count(node: yaml.Node, known: dict[int, int]) -> int:
    """The number of values that a node stands for; an alias shares the node of its anchor."""
    if known.get(id(node)) == 0:
        raise yaml.YAMLError("an alias contains itself")
    if id(node) not in known:
        # 0 marks a node whose values are being counted
        known[id(node)] = 0
        if isinstance(node, yaml.MappingNode):
            _check_keys(node)
        inside: list[Any] = [part for pair in node.value for part in pair] if isinstance(node, yaml.MappingNode) else []
        inside = node.value if isinstance(node, yaml.SequenceNode) else inside
        known[id(node)] = 1 + sum(_count(part, known) for part in inside)
    return known[id(node)]


def _check_keys(node: yaml.MappingNode) -> None:
    """Raises yaml.YAMLError where a key stands twice, because the library takes the last one without a word."""
    found: set[tuple[str, str]] = set()
    for key, _ in node.value:
        if isinstance(key, yaml.ScalarNode):
            # the tag tells the number 1 from the word "1"
            if (key.tag, key.value) in found:
                line = key.start_mark.line + 1
                raise yaml.YAMLError(f"the key {shortened(key.value)} stands twice, again in line {line}")
            found.add((key.tag, key.value))


def parse(cls: type[C], values: Mapping[str, Any], where: str) -> C:
    """`cls(**values)`; a fault is a ValueError of one line that begins with `where` and the key."""
    if not (isinstance(cls, type) and issubclass(cls, Config)):
        name = getattr(cls, "__name__", repr(cls))
        raise ValueError(f"{where}: the name must stand for a class of options (a Config), not for {name}")
    try:
        return cls(**values)
    except ValidationError as error:
        # `where` names it as the user does
        named = (f"{cls.__name__}: ", f"{where.rpartition(' ')[2]}: ")
        problem = _problem(error, cls)
        for name in named:
            problem = problem.removeprefix(name)
        raise ValueError(f"{where}: {problem}") from None
    except TypeError as error:
        raise ValueError(f"{where}: keys must be words: {error}") from None


def _problem(error: ValidationError, cls: type[Config]) -> str:
    """The first problem that pydantic found, in one line."""
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        names = cls.model_fields
        return f"{key}: unknown key{nearest(str(first['loc'][-1]), names)}; there are: {', '.join(names)}"
    if first["type"] == "missing":
        return f"{key}: missing"
    if first["type"] == "finite_number":
        return f"{key}: expected a finite number, got {first['input']}"
    if first["type"] in ("tuple_type", "list_type") and isinstance(first["input"], (str, int, float)):
        return f"{key}: expected a list, such as [{first['input']}], got {shortened(first['input'])}"
    return f"{key}: {reason_of(error)}" if key else reason_of(error)


def reason_of(error: ValidationError) -> str:
    """Why a value is refused, of the first problem that pydantic found: `Input should be less than 9, got 12`."""
    first = error.errors()[0]
    if first["type"] == "value_error":
        # a sentence of ours or of the command line, behind words of pydantic
        return first["msg"].removeprefix("Value error, ")
    return f"{first['msg']}, got {shortened(first['input'])}"


def shortened(value: Any) -> str:
    """A value for a message of one line, with its middle left out if it is long."""
    try:
        text = repr(value)
    except ValueError:
        # python writes no integer of more than 4300 digits
        return "a number of thousands of digits"
    return text if len(text) <= 100 else f"{text[:70]} ... {text[-20:]}"


def visible(text: str) -> str:
    """A text in which every character that would steer a terminal, or turn the direction of writing, is spelled out."""
    if text.isprintable():
        return text
    return "".join(c if c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cf", "Cs") else _spelled(c) for c in text)


def _spelled(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode()


def alternatives(text: str, flag: str) -> list[str]:
    """`key=a` and `key=b` for the text `key=a,b`, which was given behind `flag`.

    Commas in brackets or quotes separate nothing: `key=[1,2],[3]`. ValueError for a comma without a value on a side.
    """
    key, equals, values = text.partition("=")
    parts, depth, quote = [""], 0, ""
    for letter in values:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'" and not parts[-1].strip("[{( "):
            # an apostrophe within a word is no quote
            quote = letter
        else:
            depth += (letter in "[{") - (letter in "]}")
        if letter == "," and not quote and depth <= 0:
            parts.append("")
        else:
            parts[-1] += letter
    if len(parts) > 1 and not all(part.strip() for part in parts):
        raise ValueError(f"{flag} {shortened(text)}: a comma needs a value on both sides (null for none)")
    return [f"{key}{equals}{part}" for part in parts]


FORM = "section.key=value, e.g. train.lr=1e-3"
"""The error of `assignment` names this form unless another one is given."""


def assignment(text: str, flag: str, form: str = FORM) -> tuple[str, Any]:
    """The dotted key and the YAML value of `train.lr=1e-3`, which was given behind `flag`."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ValueError(f"{flag} {text!r}: expected {form}")
    try:
        # YAML takes a word such as *-exp, which is a pattern here, for a reference to another value
        parsed = value.strip() if value.lstrip().startswith("*") else read_yaml(value)
    except yaml.YAMLError:
        raise ValueError(f"{flag} {text!r}: the value is not valid YAML") from None
    check_finite(parsed, f"{flag} {text!r}: ")
    return key.strip(), parsed


def assignments(texts: Iterable[str], flag: str, form: str = FORM) -> list[tuple[str, Any]]:
    """Several of them, in order."""
    return [assignment(text, flag, form) for text in texts]


def options_in(texts: Iterable[str], flag: str, form: str = FORM) -> dict[str, Any]:
    """Returns the values of several assignments by key. Raises ValueError for a key that is given twice."""
    found: dict[str, Any] = {}
    for key, value in assignments(texts, flag, form):
        if key in found:
            raise ValueError(f"{flag} {key} is given twice; give it once")
        found[key] = value
    return found


def seeds_in(text: str, flag: str) -> tuple[int, ...]:
    """The seeds of `5`, which means 0 to 4, or of a list such as `3,7` or `3,`, which was given behind `flag`."""
    parts = text.split(",")
    listed = [int(part) for part in parts if part.strip().isascii() and part.strip().isdigit()]
    if len(parts) == 1 and listed and 1 <= listed[0] <= MOST_SEEDS:
        return tuple(range(listed[0]))
    given = parts[:-1] if parts[-1].strip() == "" else parts
    different = bool(listed) and len(set(listed)) == len(listed) == len(given)
    if len(parts) > 1 and different and max(listed) < 2**63:
        return tuple(listed)
    raise ValueError(
        f"{flag} {shortened(text)}: expected a number of seeds up to {MOST_SEEDS}, or different seeds such as 3,7"
    )


def seconds(text: str, flag: str) -> float:
    """The seconds of a duration such as `90s`, `10m`, `1.5h`, which was given behind `flag`."""
    number, unit = text[:-1], text[-1:]
    try:
        value = float(number) * {"s": 1.0, "m": 60.0, "h": 3600.0}[unit]
    except (KeyError, ValueError):
        value = math.nan
    # a year, because the system's timers have an end
    if not 0 < value <= 366 * 86400:
        raise ValueError(f"{flag} {text!r}: expected a duration above zero and below a year, such as 90s, 10m or 2h")
    return value


def located(where: str, call: Callable[[], T], name: str = "") -> T:
    """The result of a call whose ValueError is passed on with `where` in front, in place of the name of a class."""
    try:
        return call()
    except ValueError as error:
        raise ValueError(f"{where}: {str(error).removeprefix(f'{name}: ')}") from None
