"""Vectors for compiled loops that work on several small matrices at once, one in each lane of a register.

A chain of square roots and divisions, such as an eigenvalue iteration, leaves most of a processor idle when it
runs for one matrix; for the matrices of sixteen images it takes no longer. LLVM does not find this by itself in
loops over the lanes, and numba has no vector type, so here is one: `Lanes`, 64 bytes of numbers (sixteen in
single precision, eight in double) with arithmetic and comparisons, on every processor LLVM knows. Arrays hold
them one after another: `load(array, i)` is the i-th. Usable in `compiled` and `inlined` functions only.
"""

import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, overload, register_model

BYTES = 64

# As in `compiling`: products may be fused with sums, and a zero has no sign.
_FLAGS = ("contract", "nsz")


class Lanes(types.Type):
    """A number of `kind` for each lane."""

    def __init__(self, kind: types.Float) -> None:
        self.kind = kind
        super().__init__(f"Lanes({kind})")


class Chosen(types.Type):
    """Whether each lane of `Lanes` is chosen: what comparisons return and `choose` takes."""

    def __init__(self, kind: types.Float) -> None:
        self.kind = kind
        super().__init__(f"Chosen({kind})")


def _vector(kind: types.Float) -> ir.VectorType:
    return ir.VectorType(ir.FloatType() if kind == types.float32 else ir.DoubleType(), _count(kind))


def _count(kind: types.Float) -> int:
    return BYTES * 8 // int(kind.bitwidth)


@register_model(Lanes)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Lanes) -> None:
        super().__init__(manager, kind, _vector(kind.kind))


@register_model(Chosen)
class _ChosenModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Chosen) -> None:
        super().__init__(manager, kind, ir.VectorType(ir.IntType(1), _count(kind.kind)))


def _place(context: Any, builder: Any, kind: Any, array: Any, position: Any) -> Any:
    data = context.make_array(kind)(context, builder, array).data
    return builder.gep(builder.bitcast(data, _vector(kind.dtype).as_pointer()), [position])


@intrinsic
def load(_: Any, array: Any, position: Any) -> Any:
    """The `position`-th vector in a contiguous array."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = signature.args[0]
        return builder.load(_place(context, builder, kind, *arguments), align=kind.dtype.bitwidth // 8)

    return Lanes(array.dtype)(array, types.intp), generate


@intrinsic
def store(_: Any, array: Any, position: Any, value: Any) -> Any:
    """Write the `position`-th vector of a contiguous array."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = signature.args[0]
        place = _place(context, builder, kind, *arguments[:2])
        builder.store(arguments[2], place, align=kind.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(array, types.intp, value), generate


@intrinsic
def everywhere(_: Any, array: Any, number: Any) -> Any:
    """The same number in each lane, in the precision of `array`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = _vector(signature.args[0].dtype)
        nothing, first = ir.Constant(kind, ir.Undefined), ir.Constant(ir.IntType(32), 0)
        order = ir.Constant(ir.VectorType(ir.IntType(32), kind.count), [0] * kind.count)
        return builder.shuffle_vector(builder.insert_element(nothing, arguments[1], first), nothing, order)

    return Lanes(array.dtype)(array, array.dtype), generate


@intrinsic
def choose(_: Any, chosen: Any, one: Any, other: Any) -> Any:
    """`one` in the chosen lanes, `other` in the rest."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.select(*arguments)

    return one(chosen, one, other), generate


@intrinsic
def anywhere(_: Any, chosen: Any) -> Any:
    """Whether any lane is chosen."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        bits = builder.bitcast(arguments[0], ir.IntType(_count(signature.args[0].kind)))
        return builder.icmp_unsigned("!=", bits, ir.Constant(bits.type, 0))

    return types.boolean(chosen), generate


def _function(name: str) -> Any:
    @intrinsic
    def function(_: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            kind = _vector(signature.args[0].kind)
            full = f"llvm.{name}.v{kind.count}f{signature.args[0].kind.bitwidth}"
            found = cgutils.get_or_insert_function(builder.module, ir.FunctionType(kind, [kind]), full)
            return builder.call(found, arguments)

        return value(value), generate

    return function


square_root = _function("sqrt")
magnitude = _function("fabs")


def _operator(of: Callable[..., Any], emit: Callable[[Any, Any, Any], Any], compares: bool) -> None:
    @intrinsic
    def combine(_: Any, one: Any, other: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return emit(builder, *arguments)

        return (Chosen(one.kind) if compares else one)(one, other), generate

    def inside(one: Any, other: Any) -> Any:
        return combine(one, other)

    @overload(of, jit_options={"forceinline": True})
    def _(one: Any, other: Any) -> Any:
        return inside if isinstance(one, Lanes) and one == other else None


_operator(operator.add, lambda builder, one, other: builder.fadd(one, other, flags=_FLAGS), False)
_operator(operator.sub, lambda builder, one, other: builder.fsub(one, other, flags=_FLAGS), False)
_operator(operator.mul, lambda builder, one, other: builder.fmul(one, other, flags=_FLAGS), False)
_operator(operator.truediv, lambda builder, one, other: builder.fdiv(one, other), False)
_operator(operator.lt, lambda builder, one, other: builder.fcmp_ordered("<", one, other), True)
_operator(operator.le, lambda builder, one, other: builder.fcmp_ordered("<=", one, other), True)
_operator(operator.gt, lambda builder, one, other: builder.fcmp_ordered(">", one, other), True)
_operator(operator.eq, lambda builder, one, other: builder.fcmp_ordered("==", one, other), True)
