"""Reading a pickle of plain arrays and containers without an unpickler.

`pickle.load` runs whatever code a file names, and even a restricted one can be made to allocate any amount of
memory. Here the opcodes are only parsed (`pickletools`), and a small interpreter builds numbers, strings, lists,
tuples, dictionaries and numpy arrays of plain numbers. No object named by the file is ever called.
"""

import io
import pickletools
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from menet.errors import DataError

MAX_BYTES = 512 << 20
MAX_DEPTH = 20
PLAIN_DTYPE = re.compile(r"[<>|=]?([iu][1248]|f[248]|b1)")
# numpy moved these between its versions; the names are all that is ever used of them.
NUMPY = r"numpy(\._?core)?\.(multiarray|numeric)"
ADMITTED = {
    "reconstruct": re.compile(rf"{NUMPY} _reconstruct"),
    "frombuffer": re.compile(rf"{NUMPY} _frombuffer"),
    "ndarray": re.compile(r"numpy ndarray"),
    "dtype": re.compile(r"numpy dtype"),
    "encode": re.compile(r"_codecs encode"),
}
LITERALS = {
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("STRING", "BINSTRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"),
    *("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
}
CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
    "EMPTY_TUPLE": tuple,
}
MARK = object()


@dataclass
class Name:
    """A name the file may use; it stands for nothing that could be called."""

    kind: str


@dataclass
class Dtype:
    """A numpy type of plain numbers, as `dtype("u1", False, True)` describes it."""

    code: str


@dataclass
class Array:
    """A numpy array before and after its content is known."""

    value: np.ndarray | None = None


def read_plain_pickle(path: Path) -> object:
    """The object in a pickle of plain containers and arrays; a `DataError` for anything else."""
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise DataError(f"expected at most {MAX_BYTES} bytes in {path}, got {size}")
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    try:
        return _Finisher(len(content)).finished(_Interpreter().run(content))
    except Refused as error:
        raise DataError(f"refused to read {path}: it {error}; expected plain arrays only") from error
    # What pickletools and the interpreter raise on broken opcodes, missing operands and wrong kinds of them.
    except (
        ValueError,
        TypeError,
        KeyError,
        IndexError,
        AttributeError,
        RecursionError,
        OverflowError,
    ) as error:
        raise DataError(f"{path} is a damaged pickle ({type(error).__name__})") from error


class Refused(Exception):
    """The pickle asks for something beyond plain data."""


class _Interpreter:
    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def run(self, content: bytes) -> object:
        for opcode, argument, _ in pickletools.genops(io.BytesIO(content)):
            name = opcode.name
            if name in LITERALS:
                self.stack.append(argument)
            elif name in CONSTANTS:
                self.stack.append(CONSTANTS[name]())
            elif name == "STOP":
                return self.stack.pop()
            elif name not in ("PROTO", "FRAME"):
                handler = getattr(self, f"_{name.lower()}", None)
                if handler is None:
                    raise Refused(f"uses the opcode {name}")
                handler(argument)
        raise ValueError("no STOP")

    def _since_mark(self) -> list[Any]:
        at = len(self.stack) - 1
        while self.stack[at] is not MARK:
            at -= 1
            if at < 0:
                raise ValueError("no MARK")
        items = self.stack[at + 1 :]
        del self.stack[at:]
        return items

    def _mark(self, _: object) -> None:
        self.stack.append(MARK)

    def _put(self, argument: Any) -> None:
        self.memo[int(argument)] = self.stack[-1]

    _binput = _long_binput = _put

    def _memoize(self, _: object) -> None:
        self.memo[len(self.memo)] = self.stack[-1]

    def _get(self, argument: Any) -> None:
        self.stack.append(self.memo[int(argument)])

    _binget = _long_binget = _get

    def _list(self, _: object) -> None:
        self.stack.append(self._since_mark())

    def _tuple(self, _: object) -> None:
        self.stack.append(tuple(self._since_mark()))

    def _dict(self, _: object) -> None:
        self.stack.append(_pairs(self._since_mark()))

    def _tuple1(self, _: object) -> None:
        self._take_tuple(1)

    def _tuple2(self, _: object) -> None:
        self._take_tuple(2)

    def _tuple3(self, _: object) -> None:
        self._take_tuple(3)

    def _take_tuple(self, count: int) -> None:
        if len(self.stack) < count:
            raise IndexError("tuple of too few")
        items = tuple(self.stack[-count:])
        del self.stack[-count:]
        self.stack.append(items)

    def _append(self, _: object) -> None:
        item = self.stack.pop()
        _exactly(self.stack[-1], list).append(item)

    def _appends(self, _: object) -> None:
        items = self._since_mark()
        _exactly(self.stack[-1], list).extend(items)

    def _setitem(self, _: object) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        _exactly(self.stack[-1], dict)[_text(key)] = value

    def _setitems(self, _: object) -> None:
        items = self._since_mark()
        _exactly(self.stack[-1], dict).update(_pairs(items))

    def _global(self, argument: Any) -> None:
        for kind, pattern in ADMITTED.items():
            if pattern.fullmatch(argument):
                self.stack.append(Name(kind))
                return
        raise Refused(f"asks for {str(argument).replace(' ', '.')[:80]}")

    def _stack_global(self, _: object) -> None:
        attribute, module = _exactly(self.stack.pop(), str), _exactly(self.stack.pop(), str)
        self._global(f"{module} {attribute}")

    def _reduce(self, _: object) -> None:
        arguments, name = _exactly(self.stack.pop(), tuple), self.stack.pop()
        kind = _exactly(name, Name).kind
        if kind == "reconstruct":
            self.stack.append(Array())
        elif kind == "dtype" and PLAIN_DTYPE.fullmatch(_text(arguments[0])):
            self.stack.append(Dtype(_text(arguments[0]).lstrip("<>|=")))
        elif kind == "encode" and _text(arguments[1]) in ("latin1", "latin-1"):
            self.stack.append(_exactly(arguments[0], str).encode("latin-1"))
        elif kind == "frombuffer":
            raw, dtype, shape, order = arguments
            self.stack.append(Array(_array(raw, dtype, shape, _text(order) == "F")))
        else:
            raise Refused(f"applies {kind} to something other than plain numbers")

    def _build(self, _: object) -> None:
        state, target = _exactly(self.stack.pop(), tuple), self.stack[-1]
        if isinstance(target, Dtype):
            _, order, subtype, field_names, fields = state[:5]
            if subtype or field_names or fields:
                raise Refused("holds an array of records")
            target.code = f"{_text(order)}{target.code}"
        else:
            _, shape, dtype, fortran, raw = state
            _exactly(target, Array).value = _array(raw, dtype, shape, bool(fortran))


def _array(raw: Any, dtype: Any, shape: Any, fortran: bool) -> np.ndarray:
    code = _exactly(dtype, Dtype).code
    if not PLAIN_DTYPE.fullmatch(code):
        raise Refused(f"holds an array of {code[:20]!r}")
    content = raw.encode("latin-1") if isinstance(raw, str) else raw
    if not isinstance(content, bytes | bytearray):
        raise Refused("holds an array of objects")
    # A bytearray makes the array writable; its size is that of bytes read, whatever the shape claims.
    return np.frombuffer(bytearray(content), np.dtype(code)).reshape(shape, order="F" if fortran else "C")


class _Finisher:
    """Replaces the placeholders of arrays by the arrays, visiting no more objects than the file has bytes.

    Without that bound a few lists that contain each other many times would expand exponentially.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget

    def finished(self, value: Any, depth: int = 0) -> Any:
        self.budget -= 1
        if self.budget < 0 or depth > MAX_DEPTH:
            raise Refused("nests or repeats containers without bound")
        if isinstance(value, Array):
            return _exactly(value.value, np.ndarray)
        if isinstance(value, dict):
            return {key: self.finished(item, depth + 1) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self.finished(item, depth + 1) for item in value)
        if isinstance(value, Name | Dtype) or value is MARK:
            raise Refused("holds a bare name")
        return value


def _pairs(items: list[Any]) -> dict[str, Any]:
    # Keys are strings only: hashing a deeply nested tuple can take forever.
    return {_text(key): value for key, value in zip(items[::2], items[1::2], strict=True)}


def _text(value: Any) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else _exactly(value, str)


def _exactly(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{type(value).__name__} where {kind.__name__} was expected")
    return value
