"""Small broken trees that prove that every rule of tidy.py can fail, and sound ones that pass.

Run with `tools/tidy.py --self-test`.
"""

from __future__ import annotations

import ast
from pathlib import Path

import tidy
from tidy_source import make_tree

HEADER = "// X.\n#pragma once\n"
CLEAN = {
    "src/base/a.h": HEADER + '#include <fmt/format.h>\n\n#include "narrowfloat/error.h"\n'
                             "#define NF_X(a) (a)\n",
    "src/formats/b.h": HEADER + '#include "base/a.h"\n// printf(, std::format: only words.\n'
                                'inline auto text = "std::cout << asm(";\n'
                                "inline long big = 5'000'000;  // TO" "DO(#12): smaller.\n",
    "src/ops/quantize/c.cpp": '// Own op.\n#include <oneapi/tbb.h>\n#include "ops/quantize/c.h"\n',
    "src/layers/d.cpp": '// A layer.\n#include "ops/quantize/c.h"\n',
    "src/runtime/cuda/e.cpp": "// Host code for CUDA.\n#include <cuda_runtime.h>\n",
    "src/device/ptx/f.cuh": HEADER + 'inline void f() { asm volatile("nop;"); }\n',
    "src/runtime/cuda/g.cpp": "// No multimem.\nint x = setenv(\"NCCL_NVLS_ENABLE\", \"0\", 0);\n",
    "src/cli/main.cpp": '// CLI.\n#include <CLI/CLI.hpp>\n#include "cli/options.h"\n'
                        '#include "cli_common/output.h"\n#include "narrowfloat/narrowfloat.h"\n'
                        'int n = std::printf("x");\n',
    "src/bench_cli/main.cpp": '// CLI.\n#include "bench_cli/work.h"\n'
                              '#include "cli_common/output.h"\n',
    "python/src/module.cpp": '// Module.\n#include <nanobind/nanobind.h>\n'
                             '#include "narrowfloat/error.h"\n#include "python/src/errors.h"\n',
    "tests/conformance/all.cpp": '// Harness.\n#include "ops/quantize/c_impls.h"\n',
    "tests/words.cpp": "// The rows of a tile, and what\n// Of is for: no opening.\n"
                       "int x;  // Rows,\n        // By order of memory.\n"
                       "CodedRows rows;  // A te" "amwork of cudaMultiprocessorCount.\n",
    "tests/cited.py": '"""Sums (moe\nspec 6, 6.2), rows (spec 7)."""\n',
    "docs/moe.md": "## 6. Experts\n\n### 6.2 Sums\n",
    "docs/numerics.md": "## 7. Rows\n",
    "models/a.txt": "It lies beh" "ind us.\n",
    "docs/a.md": "[up](../README.md) [web](https://example.org) [here](#part)\n",
    "README.md": "# Title\n\n```\n[no](link.md)\n```\n\n[docs](docs)\n",
}
BROKEN = [  # Rule, files that break it.
    ("layering", {"src/base/a.h": HEADER + '#include "formats/minifloat.h"\n'}),
    ("layering", {"src/checkpoint/a.cpp": '// X.\n#include "runtime/threads.h"\n'}),
    ("layering", {"src/ops/quantize/a.cpp": '// X.\n#include "ops/dequantize/a.h"\n'}),
    ("layering", {"src/ops/quantize/a.cpp": '// X.\n#include "checkpoint/a.h"\n'}),
    ("layering", {"src/cli/main.cpp": '// X.\n#include "base/assert.h"\n'}),
    ("layering", {"src/cli/main.cpp": '// X.\n#include "bench_cli/work.h"\n'}),
    ("layering", {"src/bench_cli/main.cpp": '// X.\n#include "cli/commands.h"\n'}),
    ("layering", {"src/cli_common/output.cpp": '// X.\n#include "cli/commands.h"\n'}),
    ("layering", {"python/src/module.cpp": '// X.\n#include "base/assert.h"\n'}),
    ("layering", {"python/src/module.cpp": '// X.\n#include <fmt/format.h>\n'}),
    ("layering", {"src/cli/main.cpp": '// X.\n#include <nanobind/nanobind.h>\n'}),
    ("layering", {"examples/a.cpp": '// X.\n#include "base/assert.h"\n'}),
    ("layering", {"include/narrowfloat/a.h": HEADER + '#include "base/assert.h"\n'}),
    ("layering", {"include/narrowfloat/a.h": HEADER + "#include <fmt/format.h>\n"}),
    ("layering", {"src/tensor/a.cpp": "// X.\n#include <nlohmann/json.hpp>\n"}),
    ("layering", {"src/tensor/a.cpp": '// X.\n#include "a.h"\n'}),
    ("layering", {"tests/unit/formats/a_test.cpp": '// X.\n#include "ops/quantize/a.h"\n'}),
    ("cuda-header", {"src/tensor/a.cpp": "// X.\n#include <cuda_runtime.h>\n"}),
    ("source-included", {"tests/unit/a.cpp": '// X.\n#include "base/a.cpp"\n'}),
    ("framework-header", {"src/device/a.cuh": HEADER + "#include <torch/extension.h>\n"}),
    ("framework-header", {"tests/unit/a.cpp": "// X.\n#include <numpy/arrayobject.h>\n"}),
    ("cuda-arch", {"src/tensor/a.h": HEADER + "#if defined(__CUDA_ARCH__)\n#endif\n"}),
    ("macro", {"src/tensor/a.h": HEADER + "#define NF_X(a) (a)\n"}),
    ("macro-count", {"src/base/a.h": HEADER + "".join(f"#define N{i}(a) a\n" for i in range(13))}),
    ("asm", {"src/runtime/a.cpp": '// X.\nvoid f() { asm volatile("nop"); }\n'}),
    ("multicast", {"src/device/ptx/a.cuh": HEADER + 'void f() { asm("multimem.red.f32;"); }\n'}),
    ("multicast", {"src/runtime/cuda/a.cpp": '// X.\nvoid* f = find("cuMulticastCreate");\n'}),
    ("multicast", {"src/runtime/a.cpp": "// X.\nint a = CU_MULTICAST_GRANULARITY_MINIMUM;\n"}),
    ("multicast", {"tests/cuda/a.cu": "// X.\nvoid f() { ncclMemAlloc(&p, 1); }\n"}),
    ("multicast", {"src/runtime/a.cpp": "// X.\nvoid f() { config.nvlsCTAs = 4; }\n"}),
    ("file-size", {"src/base/a.h": HEADER + "int x;\n" * 600}),
    ("line-length", {"src/base/a.h": HEADER + "// " + "x" * 98 + "\n"}),
    ("line-length", {"CMakeLists.txt": "# " + "x" * 99 + "\n"}),
    ("template-parameters",
     {"src/base/a.h": HEADER + "template <int A, F<1, 2> B, class C, class D, class E>\nint x;\n"}),
    ("banned", {"src/base/a.cpp": '// X.\nauto s = std::format("{}", 1);\n'}),
    ("banned", {"src/base/a.cpp": "// X.\n#include <expected>\n"}),
    ("banned", {"src/base/a.cpp": "// X.\n#include <source_location>\n"}),
    ("banned", {"src/base/a.h": HEADER + "using namespace std;\n"}),
    ("banned", {"src/ops/quantize/a.cpp": '// X.\nvoid f() { std::printf("x"); }\n'}),
    ("banned", {"src/ops/quantize/a.cpp": '// X.\nvoid f() { std::cerr << "x"; }\n'}),
    ("todo", {"src/base/a.cpp": "// X.\n// TO" "DO: later\n"}),
    ("todo", {"tools/a.py": '"""X."""\n# FIX' "ME\n"}),
    ("trailing-whitespace", {"docs/a.md": "text \n"}),
    ("tab", {"src/base/a.cpp": "// X.\n\tint x;\n"}),
    ("final-newline", {"src/base/a.cpp": "// X."}),
    ("line-ending", {"src/base/a.cpp": "// X.\r\n"}),
    ("machine-path", {"docs/a.md": "see " "/wo" "rk/main\n"}),
    ("pragma-once", {"src/base/a.h": "// X.\nint x;\n"}),
    ("opening-comment", {"src/base/a.cpp": "int x;\n"}),
    ("opening-comment", {"tools/a.sh": "#!/bin/sh\nset -e\n"}),
    ("dead-link", {"docs/a.md": "[text](missing.md)\n"}),
    ("citation", {"docs/moe.md": "## 1. One\n", "src/base/a.cpp": "// X (moe\n// spec 1, 1.2).\n"}),
    ("citation", {"docs/moe.md": "## 1. One\n", "tests/a.py": '"""Y."""  # By spec 1.5.\n'}),
    ("banned-word", {"docs/a.md": "A long " "tile of weights.\n"}),
    ("banned-word", {"docs/a.md": "The rows lie beh" "ind it.\n"}),
    ("banned-word", {"src/base/a.cpp": "// X.\nconstexpr int kLong" "Tiles = 2;\n"}),
    ("banned-word", {"src/base/a.cpp": "// X.\nint few_" "slots = 2;\n"}),
    ("banned-word", {"src/base/a.cpp": "// A block of\n// 512 " "threads.\n"}),
    ("banned-word", {"src/base/a.cpp": '// X.\nauto text = "non' 'sense";\n'}),
    ("banned-word", {"tests/row_te" "am_test.cpp": "// X.\n"}),
    ("banned-word", {"src/ops/grouped_gemm/sm90/a.cuh": HEADER + "// Pan" "el.\n"}),
    ("fragment", {"src/base/a.cpp": "// Of a row.\nint x;\n"}),
    ("fragment", {"src/base/a.cpp": "// For people.\nint x;\n"}),
    ("fragment", {"src/base/a.cpp": "// X.\nint x;  // What it is.\n"}),
    ("fragment", {"src/base/a.cpp": "// X.\nint x;  // By row.\nint y;\n"}),
    ("fragment", {"tools/a.py": '"""X."""\nx = 1\n# What a loop does.\n'}),
    ("fragment", {"tools/a.py": '"""Of a file."""\n'}),
    ("fragment", {"cmake/a.cmake": "# What a build needs.\n"}),
]


def rules_in_source() -> set[str]:
    """The names of all rules: third argument of every Finding(...) of tidy.py."""
    tree = ast.parse(Path(tidy.__file__).read_text())
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and len(n.args) > 3]
    return {c.args[2].value for c in calls if getattr(c.func, "id", "") == "Finding"}


def self_test() -> int:
    """Prints what went wrong; 0 if nothing did."""
    errors = [f"sound tree: {f}" for f in tidy.run(make_tree(CLEAN))]
    for rule, contents in BROKEN:
        found = {f.rule for f in tidy.run(make_tree(contents))}
        if found != {rule}:
            errors.append(f"{rule}: found {sorted(found)} in {contents}"[:300])
    errors += [f"{rule}: no example" for rule in rules_in_source() - {rule for rule, _ in BROKEN}]
    print("\n".join(errors) or f"tidy self-test: {len(BROKEN)} broken examples found, sound passed")
    return 1 if errors else 0
