"""The instructions of AMX as functions of LLVM IR, for `amx_unit.EmulatedTiles`.

They give the bits that Intel's manual says, but for sign and payload of NaN. A tile is 16 rows of 16 words, one behind the other.
None is inlined: a kernel has dozens of products, which would be nearly all of its code then.
"""

from __future__ import annotations

from collections.abc import Callable

_ROW = "<16 x i32>"
_ROWS = _WORDS = 16


def _vector(value: int) -> str:
    """A constant with this value in all its lanes."""
    return "<" + ", ".join([f"i32 {value}"] * _WORDS) + ">"


_LOAD = """
define linkonce_odr hidden i32 @prefuse_tileloadd(ptr %tile, ptr %source, i64 %stride) noinline {
entry:
  br label %rows
rows:
  %row = phi i64 [0, %entry], [%next, %rows]
  %at = mul i64 %row, %stride
  %from = getelementptr i8, ptr %source, i64 %at
  %to = getelementptr <16 x i32>, ptr %tile, i64 %row
  %words = load <16 x i32>, ptr %from, align 1
  store <16 x i32> %words, ptr %to, align 4
  %next = add i64 %row, 1
  %done = icmp eq i64 %next, 16
  br i1 %done, label %end, label %rows
end:
  ret i32 0
}"""

_FLUSHED = f"""
define linkonce_odr hidden <16 x float> @prefuse_tile_flushed(<16 x float> %x) alwaysinline {{
  %bits = bitcast <16 x float> %x to {_ROW}
  %exponent = and {_ROW} %bits, {_vector(0x7F800000)}
  %issubnormal = icmp eq {_ROW} %exponent, zeroinitializer
  %r = select <16 x i1> %issubnormal, <16 x float> zeroinitializer, <16 x float> %x
  ret <16 x float> %r
}}"""


def _dot(instruction: str, row_type: str, parts: int, add: Callable[[int], str], both: str) -> str:
    """The product of two tiles: for each row of A, `parts` vectors of sums over its words, each word beside a row of B.

    `add` makes sum %newI of %sumI, %x and %y; `both` makes %total of these sums and of %old, the row of the third tile.
    """
    sums = "\n".join(f"  %sum{i} = phi {row_type} [zeroinitializer, %rows], [%new{i}, %words]" for i in range(parts))
    return f"""
define linkonce_odr hidden i32 @prefuse_{instruction}(ptr %sums, ptr %a, ptr %b) noinline {{
entry:
  br label %rows
rows:
  %row = phi i64 [0, %entry], [%nextrow, %stored]
  %place = getelementptr {_ROW}, ptr %sums, i64 %row
  %line = getelementptr {_ROW}, ptr %a, i64 %row
  %old = load {row_type}, ptr %place, align 4
  br label %words
words:
  %word = phi i64 [0, %rows], [%nextword, %words]
{sums}
  %xat = getelementptr i32, ptr %line, i64 %word
  %xone = load i32, ptr %xat, align 4
  %xfirst = insertelement {_ROW} poison, i32 %xone, i32 0
  %x = shufflevector {_ROW} %xfirst, {_ROW} poison, {_ROW} zeroinitializer
  %yat = getelementptr {_ROW}, ptr %b, i64 %word
  %y = load {_ROW}, ptr %yat, align 4
{"".join(map(add, range(parts)))}
  %nextword = add i64 %word, 1
  %lastword = icmp eq i64 %nextword, {_WORDS}
  br i1 %lastword, label %stored, label %words
stored:
{both}
  store {row_type} %total, ptr %place, align 4
  %nextrow = add i64 %row, 1
  %lastrow = icmp eq i64 %nextrow, {_ROWS}
  br i1 %lastrow, label %end, label %rows
end:
  ret i32 0
}}"""


def _flush(name: str, value: str) -> str:
    return f"""
  %{name} = call <16 x float> @prefuse_tile_flushed(<16 x float> %{value})"""


def _pair(half: int) -> str:
    """Add the products of the low or high bfloat16 numbers of words to a sum."""
    bits = "and <16 x i32> %{0}, " + _vector(-0x10000) if half else "shl <16 x i32> %{0}, " + _vector(16)
    lines = [
        f"""
  %{name}bits{half} = {bits.format(name)}
  %{name}wide{half} = bitcast {_ROW} %{name}bits{half} to <16 x float>{_flush(f"{name}{half}", f"{name}wide{half}")}"""
        for name in "xy"
    ]
    return f"""{"".join(lines)}
  %wideproduct{half} = fmul <16 x float> %x{half}, %y{half}{_flush(f"product{half}", f"wideproduct{half}")}
  %widesum{half} = fadd <16 x float> %sum{half}, %product{half}{_flush(f"new{half}", f"widesum{half}")}"""


_BOTH = f"""
  %wideboth = fadd <16 x float> %new0, %new1{_flush("both", "wideboth")}
  %widetotal = fadd <16 x float> %old, %both{_flush("total", "widetotal")}"""


def _bytes(signs: tuple[bool, bool]) -> Callable[[int], str]:
    """Add the products of the four bytes of words, the operands signed or not, to a sum."""

    def byte(name: str, number: int, is_signed: bool) -> str:
        shift = "ashr" if is_signed else "lshr"
        return f"""
  %{name}top{number} = shl {_ROW} %{name}, {_vector(24 - 8 * number)}
  %{name}{number} = {shift} {_ROW} %{name}top{number}, {_vector(24)}"""

    def add(_: int) -> str:
        lines, before = [], "%sum0"
        for number in range(4):
            after = "%new0" if number == 3 else f"%until{number}"
            operands = "".join(byte(name, number, is_signed) for name, is_signed in zip("xy", signs, strict=True))
            lines.append(f"""{operands}
  %product{number} = mul {_ROW} %x{number}, %y{number}
  {after} = add {_ROW} {before}, %product{number}""")
            before = after
        return "".join(lines)

    return add


_SUM = f"  %total = add {_ROW} %old, %new0"

LLVM_FUNCTIONS = "\n".join(
    [
        _LOAD,
        _FLUSHED,
        _dot("tdpbf16ps", "<16 x float>", 2, _pair, _BOTH),
        _dot("tdpbusd", _ROW, 1, _bytes((False, True)), _SUM),
        _dot("tdpbssd", _ROW, 1, _bytes((True, True)), _SUM),
        _dot("tdpbsud", _ROW, 1, _bytes((True, False)), _SUM),
    ]
)
