"""tests/tools/sass.py reads listings of machine code: sizes, loads on their way, accesses by pointers of any memory."""

from __future__ import annotations

import sys

import pytest

from support.simt_build import ROOT

sys.path.append(str(ROOT / "tests" / "tools"))
import sass

LISTING = """
Fatbin elf code:
arch = sm_90
\tcode for sm_90
\t\tFunction : _Z5first
        /*0000*/                   LDC R1, c[0x0][0x28] ;          /* 0x0 */
                                                                   /* 0x1 */
        /*0010*/              @!P0 LDG.E R6, desc[UR4][R2.64] ;    /* 0x0 */
\t\tFunction : _Z6second
        /*0000*/                   EXIT ;                          /* 0x0 */
\tcode for sm_80
\t\tFunction : _Z5first
        /*0000*/             @UP0  BRA 0x10 ;                      /* 0x0 */
"""


def test_kernels_of_a_listing() -> None:
    first, second, older = sass.read(LISTING)
    assert first == ("_Z5first", "sm_90", ["LDC R1, c[0x0][0x28]", "LDG.E R6, desc[UR4][R2.64]"], ())
    assert second == ("_Z6second", "sm_90", ["EXIT"], ())
    assert (older.kernel, older.architecture, older.instructions) == ("_Z5first", "sm_80", ["BRA 0x10"])


@pytest.mark.parametrize(
    ("lines", "most"),
    [
        (["LDG.E R6, [R2.64]", "IADD3 R7, R6, 1, RZ", "LDG.E R8, [R2.64]"], 1),
        (["LDG.E R6, [R2.64]", "IADD3 R7, R9, 1, RZ", "LDG.E R8, [R2.64+0x80]", "IADD3 R6, R8, R6, RZ"], 2),
        (["LDG.E R6, [R2.64]", "BRA 0x40", "LDG.E R8, [R2.64]"], 1),
        (["LDG.E R6, [R2.64]", "LDG.E R8, [R6.64]"], 1),
        (
            ["LDG.E.64 R6, [R2.64]", "ISETP.EQ P0, R7, -0x1", "LDG.E.64 R8, [R2.64+0x80]"],
            1,
        ),  # R7 is its second half
        (["STG.E [R2.64], R6"], 0),
    ],
)
def test_loads_in_flight(lines: list[str], most: int) -> None:
    assert sass.loads_in_flight(lines) == most


@pytest.mark.parametrize(
    ("lines", "at"),
    [
        (["LDC R1, c[0x0][0x28]", "STS [R2], RZ", "ACQBULK", "PREEXIT", "LDG.E R6, [R2.64]"], None),
        (["LDG.E R6, [R2.64]", "ACQBULK"], 0),
        (["STG.E [R2.64], R6", "ACQBULK"], 0),
        (["S2R R0, SR_TID.X", "LDGSTS.E [R5], [R2.64]", "ACQBULK"], 1),
        (["ATOMG.E.ADD R2, [R4.64], R6", "ACQBULK"], 0),
        (["RED.E.ADD [R4.64], R6", "ACQBULK"], 0),
        (["LD.E R6, [R2.64]", "ACQBULK"], 0),
        (["PREEXIT", "ACQBULK"], 0),
        (["ISETP.GE.AND P0, PT, R0, UR4, PT", "EXIT", "ACQBULK"], 1),  # a block without work
        (["BRA 0x80", "ACQBULK"], 0),  # around the wait
    ],
)
def test_a_kernel_waits_before_all_else(lines: list[str], at: int | None) -> None:
    of = "route<int> on sm_90 comes to {} before it waits for the kernel ahead"
    wanted = [] if at is None else [of.format(lines[at])]
    assert sass.faults([sass.Code("route<int>", "sm_90", lines)]) == wanted
    assert not sass.faults([sass.Code("route<int>", "sm_80", lines)])


@pytest.mark.parametrize("kernel", ["borrow", "borrow_backward<float,float>"])
def test_a_kernel_that_lets_nobody_start_beside_it(kernel: str) -> None:
    lines = ["ACQBULK", "PREEXIT", "STG.E [R2.64], R6"]
    assert sass.faults([sass.Code(kernel, "sm_90", lines)]) == [
        f"{kernel} on sm_90 lets the next kernel start before it has ended"
    ]
    assert not sass.faults([sass.Code("route<int>", "sm_90", lines)])


def test_blocks_with_words_for_each_other_have_fences() -> None:
    loads = [f"LDG.E R{10 + i}, [R2.64]" for i in range(8)]
    for fences, faults in (
        (1, ["route_columns<1,int> on sm_80 has 1 fences between its blocks, not 2"]),
        (2, []),
    ):
        lines = [*loads, *["MEMBAR.SC.GPU"] * fences]
        assert sass.faults([sass.Code("route_columns<1,int>", "sm_80", lines)]) == faults


def test_a_kernel_without_a_wait() -> None:
    (found,) = sass.faults([sass.Code("borrow", "sm_100", ["LDC R1, c[0x0][0x28]"])])
    assert found == "borrow on sm_100 comes to its end before it waits for the kernel ahead"


def test_faults_are_named() -> None:
    waits = ["LDG.E R6, [R2.64]", "IADD3 R7, R6, 1, RZ"]
    found = sass.faults(
        [
            sass.Code("count_numbered<1,long>", "sm_80", waits),
            sass.Code(
                "plan_exact_fetched<true>", "sm_80", ["ATOMS.ADD R2, [R4], R6", "ATOM.E.ADD R2, [R4.64], R6"]
            ),
            sass.Code("borrow", "sm_80", [*waits, "LD.E R4, [R2.64]"]),
        ]
    )
    assert found == [
        "count_numbered<1,long> on sm_80 has 1 loads on their way at once, not 8",
        "plan_exact_fetched<true> on sm_80 has 1 accesses by pointers of any memory, as ATOM.E.ADD R2, [R4.64], R6",
    ]


SYMBOLS = """
     3: 0000000000000000 60288 FUNC    LOCAL  DEFAULT [<other>: 10]    13 _Z6top_upv
     4: 0000000000000000     0 SECTION LOCAL  DEFAULT   13 .text._Z6top_upv
     9: 000000000000e4f0  1680 FUNC    WEAK   DEFAULT   13 $__internal_0_$__cuda_sm20_div_s64
    12: 0000000000000000  9000 FUNC    GLOBAL DEFAULT [<other>: 10]    14 _Z5sharev
"""


def test_subroutines_of_a_kernel_are_those_in_its_section() -> None:
    assert sass.in_sections(SYMBOLS) == {"_Z6top_upv": ("__cuda_sm20_div_s64",), "_Z5sharev": ()}


def test_a_plan_kernel_calls_no_division_of_64_bits() -> None:
    called = ("__cuda_sm20_div_rn_f64_full", "__cuda_sm20_rem_u64")
    of = ["plan_exact_fetched<false>", "route<int>"]
    found = sass.faults([sass.Code(name, "sm_80", ["EXIT"], called) for name in of])
    assert found == ["plan_exact_fetched<false> on sm_80 calls __cuda_sm20_rem_u64"]


def test_a_division_is_counted() -> None:
    lines = [
        "I2F.U32.RP R2, R3",
        "MUFU.RCP R2, R2",
        "F2I.FTZ.U32.TRUNC.NTZ R2, R2",
        "MUFU.RCP64H R5, R7",
        "EXIT",
    ]
    assert sass.divisions(lines) == 2
