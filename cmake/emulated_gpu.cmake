# Kernels as C++ for the CPU (tests/emulator): the CUDA part of the library, but for the compiler
# and the runtime. For tests alone; needs the toolkit's headers, not nvcc.
find_path(NARROWFLOAT_CUDA_HEADERS cuda_runtime.h HINTS $ENV{CUDA_HOME}/include
                                                       /usr/local/cuda/include REQUIRED)
# Which code a GPU runs is chosen as for these; all of it is Hopper's.
set(narrowfloat_gpus 80-virtual 90a)

add_library(emulated_gpu STATIC tests/emulator/instructions.cpp tests/emulator/runtime.cpp
                                tests/emulator/schedule.cpp tests/emulator/tensor_maps.cpp)
target_include_directories(emulated_gpu PRIVATE tests)
target_include_directories(emulated_gpu SYSTEM PUBLIC ${NARROWFLOAT_CUDA_HEADERS})
target_link_libraries(emulated_gpu PRIVATE narrowfloat_options)
add_library(CUDA::cudart_static INTERFACE IMPORTED GLOBAL)
target_link_libraries(CUDA::cudart_static INTERFACE emulated_gpu)

# The .cu files of a target; call it in the target's directory. Nothing else of a target differs from
# the build for GPUs, whose objects a compiler cache has. Most of a kernel's time goes into the
# emulator, so -O1 is enough, and compiles sooner. The replaced headers are found before those of
# src, as -iquote comes before -I.
function(narrowfloat_emulate target)
  get_target_property(sources ${target} SOURCES)
  list(FILTER sources INCLUDE REGEX "\\.cu$")
  set(tests ${PROJECT_SOURCE_DIR}/tests)
  set_source_files_properties(
    ${sources} TARGET_DIRECTORY ${target}
    PROPERTIES LANGUAGE CXX
               COMPILE_DEFINITIONS "__CUDA_ARCH_FEAT_SM90_ALL;__CUDA_ARCH__=900"
               COMPILE_OPTIONS "-xc++;-w;-O1;-fno-strict-aliasing;-iquote${tests}/emulator/replaced;\
-iquote${tests};-include;emulator/language.h")
endfunction()
