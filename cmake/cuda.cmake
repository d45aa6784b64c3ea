# CUDA is optional. Kernels are compiled ahead of time for sm_90a; nothing is compiled at run time.
if(NOT CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES 90a-real)
endif()
enable_language(CUDA)
find_package(CUDAToolkit REQUIRED)
# CMake 3.25 does not know that nvcc 13 has C++20.
if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
endif()
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
# Global fast-math flags are never used: `fast` mode spells out its approximations (spec 17.1).
# Register spills are errors like all other warnings, on the architecture that kernels are tuned
# for.
if(CMAKE_CUDA_ARCHITECTURES STREQUAL "90a-real" OR CMAKE_CUDA_ARCHITECTURES STREQUAL "90a")
  set(spill_warnings -Xptxas=-warn-spills)
endif()
if(NARROWFLOAT_WERROR)
  set(cuda_warnings_are_errors -Werror=all-warnings -Xcompiler=-Werror)
endif()
target_compile_options(narrowfloat_options
                       INTERFACE $<$<COMPILE_LANGUAGE:CUDA>:${cuda_warnings_are_errors} -fmad=false
                                 ${spill_warnings}
                                 -Xcompiler=-Wall,-Wextra,-Wno-missing-field-initializers
                                 -Xcompiler=-ffp-contract=off>)
