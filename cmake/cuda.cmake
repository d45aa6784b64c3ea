# CUDA is optional. Kernels are compiled ahead of time, by default for Hopper.
# CMAKE_CUDA_ARCHITECTURES names architectures that kernels have code of their own for (90a-real;
# 100a-real and 103a-real, which have never run), and others from 80 on, which get the portable
# code, as machine code (86-real) or as PTX (80-virtual): decision 0039.
if(NOT CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES 90a-real)
endif()
foreach(architecture IN LISTS CMAKE_CUDA_ARCHITECTURES)
  if(NOT architecture MATCHES "^(90|100|103)a(-real)?$"
     AND NOT architecture MATCHES "^([89][0-9]|1[0-9][0-9])(-real|-virtual)?$")
    message(FATAL_ERROR "CMAKE_CUDA_ARCHITECTURES: expected 90a-real, 100a-real, 103a-real, or "
                        "numbers from 80 on with -real, -virtual or neither, got ${architecture}")
  endif()
  # A GPU that both fit would run the driver's choice.
  string(REGEX MATCH "^[0-9]+" number ${architecture})
  if(architecture MATCHES "^[0-9]+a" AND CMAKE_CUDA_ARCHITECTURES MATCHES "(^|;)${number}(-real)?(;|$)")
    message(FATAL_ERROR "CMAKE_CUDA_ARCHITECTURES: expected either ${number}a or ${number}, got "
                        "both: ${CMAKE_CUDA_ARCHITECTURES}")
  endif()
endforeach()
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
