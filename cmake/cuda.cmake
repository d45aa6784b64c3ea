# CUDA is optional. Kernels are compiled ahead of time, by default for Hopper.
# CMAKE_CUDA_ARCHITECTURES names architectures that kernels have code of their own for (90a-real;
# 100a-real and 103a-real, which have never run), and others from 80 on, which get the portable
# code, as machine code (86-real) or as PTX (80-virtual): decision 0039.
if(NOT CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES 90a-real)
endif()
include(cmake/gpu_architectures.cmake)
narrowfloat_check_architectures("${CMAKE_CUDA_ARCHITECTURES}")
set(narrowfloat_gpus ${CMAKE_CUDA_ARCHITECTURES})
enable_language(CUDA)
find_package(CUDAToolkit REQUIRED)
narrowfloat_split_architectures("${narrowfloat_gpus}" CMAKE_CUDA_ARCHITECTURES portable_flags)
string(APPEND CMAKE_CUDA_FLAGS "${portable_flags}")
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
if(narrowfloat_gpus STREQUAL "90a-real" OR narrowfloat_gpus STREQUAL "90a")
  set(ptxas_warnings -Xptxas=-warn-spills)
else()
  # Some kernels ask for the 2048 threads of Hopper's SM at once, which ptxas ignores, with a
  # warning, where there are 1536.
  set(ptxas_warnings -Xptxas=--disable-warnings)
endif()
if(NARROWFLOAT_WERROR)
  set(cuda_warnings_are_errors -Werror=all-warnings -Xcompiler=-Werror)
endif()
target_compile_options(narrowfloat_options
                       INTERFACE $<$<COMPILE_LANGUAGE:CUDA>:${cuda_warnings_are_errors} -fmad=false
                                 ${ptxas_warnings}
                                 -Xcompiler=-Wall,-Wextra,-Wno-missing-field-initializers
                                 -Xcompiler=-ffp-contract=off>)
