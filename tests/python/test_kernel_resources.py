"""tools/kernel_resources.py: what it reads from cuobjdump's output, and what it refuses."""

import dataclasses
import importlib.util
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "kernel_resources.py"
SPEC = importlib.util.spec_from_file_location("kernel_resources", TOOL)
tool = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(tool)

NAME = ("void narrowfloat::multiply_groups_kernel<narrowfloat::GemmShapeOf<"
        "narrowfloat::Fp8Weights, true, 128, false> >(narrowfloat::GemmParams)")
OTHER = "narrowfloat::(anonymous namespace)::clear_slots_kernel(narrowfloat::Slots)"
RESOURCES = f"""
member build/src/libnarrowfloat.a:gemm_wide.cu.o:
Resource usage:
 Common:
  GLOBAL:0
 Function {NAME}:
  REG:168 STACK:0 SHARED:1024 LOCAL:0 CONSTANT[0]:992 TEXTURE:0
member build/src/libnarrowfloat.a:clear_slots.cu.o:
 Function {OTHER}:
  REG:20 STACK:40 SHARED:0 LOCAL:0 CONSTANT[0]:600 TEXTURE:0
"""
SASS = f"""
\t\tFunction : {NAME}
        /*0000*/                   LDC R1, c[0x0][0x28] ;                 /* 0x00000a00ff017b82 */
                                                                          /* 0x000fe20000000800 */
        /*0010*/              @!P0 QGMMA.64x128x32.F32.E4M3.E4M3 R24, gdesc[UR4], !UPT ;  /* 0 */
        /*0020*/                   QGMMA.64x128x32.F32.E4M3.E4M3 R24, gdesc[UR8], R24 ;  /* 0 */
        /*0030*/                   NOP ;                                  /* 0x00000000 */
\t\tFunction : {OTHER}
        /*0000*/                   EXIT ;                                 /* 0x000000000000794d */
"""


@pytest.fixture
def kernels():
    found = tool.parse_resources(RESOURCES)
    tool.count_instructions(SASS, found)
    return found


def test_resources_and_instructions(kernels):
    gemm = kernels[NAME]
    assert (gemm.template, gemm.registers, gemm.stack, gemm.shared) == (tool.GEMM, 168, 0, 1024)
    assert gemm.instructions == 3
    assert gemm.wgmma == {"QGMMA.64x128x32.F32.E4M3.E4M3": 2}
    assert kernels[OTHER].template == "clear_slots_kernel"
    assert kernels[OTHER].instructions == 1


def test_tables(kernels):
    assert "| `clear_slots_kernel` | 1 | 20 | 40 | 0 |" in tool.kernel_table([*kernels.values()])
    table = tool.gemm_table([kernels[NAME]])
    assert table.endswith("| `Fp8Weights` | yes | 128 | no | 168 | 3 | 2 QGMMA.64x128x32 |")
    split = dataclasses.replace(kernels[NAME], name=NAME.replace("128, false", "8, true"))
    assert "| `Fp8Weights` | yes | 8 | yes |" in tool.gemm_table([split])


def test_instantiations_are_counted_by_operation(tmp_path, kernels):
    for path in ("ops/grouped_gemm/sm90/gemm_wide.cu", "moe_shared/clear_slots.cu"):
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).touch()
    table = tool.operation_table([*kernels.values()], tool.operations(tmp_path))
    assert "| `grouped_gemm` | 1 | 168 | 0 | 1024 |" in table
    assert "| `moe_shared` | 1 | 20 | 40 | 0 |" in table
    assert table.endswith("2 instantiations of 2 kernels.")


def test_faults(kernels):
    gemm = kernels[NAME]
    assert tool.faults([gemm]) == []
    gemm.stack = 8
    gemm.wgmma.clear()
    stack, wgmma = tool.faults([gemm])
    assert stack.endswith("a stack of 8 bytes, expected none")
    assert wgmma.endswith("no HGMMA or QGMMA instruction")
    assert "NARROWFLOAT_CUDA" in tool.faults([])[0]


def test_only_the_marked_part_of_a_page_is_written(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"above\n{tool.BEGIN}\nold\n{tool.END}\nbelow\n")
    tool.write_tables(page, "new")
    assert page.read_text() == f"above\n{tool.BEGIN}\n\nnew\n\n{tool.END}\nbelow\n"
    page.write_text("no marks")
    with pytest.raises(SystemExit, match="expected the lines"):
        tool.write_tables(page, "new")
    assert page.read_text() == "no marks"


def test_a_page_that_is_out_of_date(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"{tool.BEGIN}\n{tool.END}\n")
    tool.write_tables(page, "| 1 |")
    assert tool.is_current(page.read_text(), "| 1 |")
    assert not tool.is_current(page.read_text(), "| 2 |")


def test_what_cannot_be_checked_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert tool.why_unchecked("nvcc 13.0", "cuobjdump") == "cuobjdump is not there"
    for name, text in (("cuobjdump", ""), ("nvcc", "tools, release 13.0, V13.0.88")):
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\necho '{text}'\n")
        program.chmod(0o755)
    assert tool.why_unchecked("as nvcc 13.0 compiles it", "cuobjdump") == ""
    assert "nvcc 12.8, not" in tool.why_unchecked("as nvcc 12.8 compiles it", "cuobjdump")
