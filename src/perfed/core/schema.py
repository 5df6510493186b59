"""Options: frozen dataclasses that check themselves, whether built from Python or from YAML.

Why not pydantic: training must work where only torch, numpy and scikit-learn are installed, and
what is needed here (types, ranges, the nearest known key, a dotted path in the message) is short.

>>> @dataclass(frozen=True)
... class Cooking(Options):
...     minutes: int = option(5, "how long it cooks", ge=1)
>>> from_mapping(Cooking, {"minuts": 3})
Traceback (most recent call last):
    ...
perfed.core.errors.ConfigError: minuts: unknown key; did you mean 'minutes'? (known: minutes)
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from perfed.core.errors import ConfigError, cut, did_you_mean, shown

T = TypeVar("T", bound="Options")

LONGEST_TEXT = 10_000  # characters: names, paths, a sentence
LARGEST_INTEGER = 2**63 - 1  # what NumPy and PyTorch can count to

BOUNDS: dict[str, tuple[Callable[[Any, Any], bool], str]] = {
    "ge": (lambda value, bound: value >= bound, "at least"),
    "gt": (lambda value, bound: value > bound, "more than"),
    "le": (lambda value, bound: value <= bound, "at most"),
    "lt": (lambda value, bound: value < bound, "less than"),
}


def option(default: Any, help: str, *, symbol: str = "", **bounds: float) -> Any:
    """A field with a default, a sentence of help, and bounds (``ge``, ``gt``, ``le``, ``lt``).

    An option with a ``symbol`` is always in a component's label: ``perfed-ckt (c=3, λ=2)``.
    """
    unknown = set(bounds) - set(BOUNDS)
    if unknown:
        raise TypeError(f"unknown bounds {sorted(unknown)}")
    shown = {"symbol": symbol} if symbol else {}
    return dataclasses.field(default=default, metadata={"help": help, **shown, **bounds})


@dataclass(frozen=True)
class Options:
    """Base of everything configurable: on creation each field is coerced and checked."""

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for field in dataclasses.fields(self):
            try:
                value = coerce(hints[field.name], getattr(self, field.name))
                _check_bounds(value, field.metadata)
            except ConfigError as error:
                raise error.inside(field.name) from None
            object.__setattr__(self, field.name, value)
        self.validate()

    def validate(self) -> None:
        """Checks that involve more than one field; raises ConfigError."""

    @classmethod
    def expand(cls, value: Any) -> Any:
        """A short form written out; by default there is none."""
        return value


def from_mapping(cls: type[T], values: Mapping[str, Any]) -> T:
    """Build ``cls`` from a mapping, refusing keys it does not have."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"expected keys and values, got {_describe(values)}")
    known = [field.name for field in dataclasses.fields(cls)]
    for key in values:
        if key not in known:
            raise ConfigError(f"unknown key{did_you_mean(str(key), known)}", cut(str(key)))
    return cls(**values)


def to_mapping(options: Options) -> dict[str, Any]:
    """The inverse of :func:`from_mapping`: plain dicts, lists and scalars."""
    return {
        field.name: plain(getattr(options, field.name)) for field in dataclasses.fields(options)
    }


def plain(value: Any) -> Any:
    """``value`` as YAML and JSON know it."""
    if isinstance(value, Options):
        named = getattr(value, "import_path", "") or getattr(value, "registered_name", "")
        return ({"name": named} if named else {}) | to_mapping(value)
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def _describe(value: Any) -> str:
    return "nothing" if value is None else f"{type(value).__name__} {shown(value)}"


def coerce(hint: Any, value: Any) -> Any:
    """``value`` as ``hint`` says, or a ConfigError. Widens (int to float, list to tuple) only."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if origin in (Union, types.UnionType):
        return _coerce_union(arguments, value)
    if origin is Literal:
        if value not in arguments:
            raise ConfigError(f"{shown(value)} is none of {', '.join(map(repr, arguments))}")
        return value
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise ConfigError(f"expected a list, got {_describe(value)}")
        return tuple(_coerce_item(arguments[0], item, n) for n, item in enumerate(value))
    if hint is float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"expected a number, got {_describe(value)}")
        return _finite(value)
    if hint is int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"expected a whole number, got {_describe(value)}")
        return _countable(value)
    if isinstance(hint, type) and issubclass(hint, Options):
        return _coerce_options(hint, value)
    if isinstance(hint, type):
        if not isinstance(value, hint):
            raise ConfigError(f"expected {hint.__name__}, got {_describe(value)}")
        return _writable(value) if isinstance(value, str) else value
    raise TypeError(f"options cannot hold {hint!r}")


def _finite(value: float) -> float:
    """No option means something where it is infinite, and JSON could not hold it."""
    try:
        number = float(value)
    except OverflowError:
        raise ConfigError("the number is too large") from None
    if not math.isfinite(number):
        raise ConfigError(f"expected a finite number, got {number}")
    return number


def _countable(value: int) -> int:
    if abs(value) > LARGEST_INTEGER:
        raise ConfigError(f"{shown(value)} is out of range: must be at most {LARGEST_INTEGER}")
    return value


def _writable(text: str) -> str:
    """A configuration is written into its run directory: that must not fail after the run."""
    if len(text) > LONGEST_TEXT:
        raise ConfigError(f"{len(text):,} characters: must be at most {LONGEST_TEXT:,}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        half = ascii(text[error.start])
        raise ConfigError(f"{half} is half a character: must be whole ones (UTF-8)") from None
    return text


def _coerce_item(hint: Any, item: Any, position: int) -> Any:
    try:
        return coerce(hint, item)
    except ConfigError as error:
        raise error.inside(f"[{position}]") from None


def _coerce_union(choices: tuple[Any, ...], value: Any) -> Any:
    if value is None and type(None) in choices:
        return None
    errors = []
    for choice in choices:
        if choice is type(None):
            continue
        try:
            return coerce(choice, value)
        except ConfigError as error:
            errors.append(error)
    raise errors[-1]


def _coerce_options(hint: type[Options], value: Any) -> Options:
    registry = getattr(hint, "registry", None)
    if isinstance(value, hint):
        if registry is not None:
            registry.know(type(value))
        return value
    value = hint.expand(value)
    if registry is not None:
        return typing.cast(Options, registry.build(value))
    return from_mapping(hint, value)


def _check_bounds(value: Any, metadata: Mapping[str, Any]) -> None:
    for item in value if isinstance(value, tuple) else (value,):
        for name, (holds, words) in BOUNDS.items():
            number = isinstance(item, int | float)  # or nothing, or another kind of value
            if name in metadata and number and not holds(item, metadata[name]):
                raise ConfigError(f"{item!r} is out of range: must be {words} {metadata[name]}")
