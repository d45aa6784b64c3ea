# Sources for one level of x86 vector instructions (src/runtime/vector_level.h), compiled alone with
# the level's flags. Builds for other processors leave them out; NARROWFLOAT_VECTOR_LEVELS says that
# the lists of implementations have them. The build with ThreadSanitizer is for what calls share:
# kernels of a level share nothing, and take long to compile.
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64)$"
   AND NOT NARROWFLOAT_SANITIZE STREQUAL "thread")
  set(NARROWFLOAT_VECTOR_LEVELS ON)
endif()
set(NARROWFLOAT_FLAGS_avx2 -mavx2 -mfma -mf16c)
set(NARROWFLOAT_FLAGS_avx512 ${NARROWFLOAT_FLAGS_avx2} -mavx512f -mavx512bw -mavx512vl -mavx512dq
                             -mavx512vbmi -mavx512vnni)
set(NARROWFLOAT_FLAGS_avx512_bf16 ${NARROWFLOAT_FLAGS_avx512} -mavx512bf16)
set(NARROWFLOAT_FLAGS_amx_bf16 ${NARROWFLOAT_FLAGS_avx512_bf16} -mamx-tile -mamx-bf16)
set(NARROWFLOAT_FLAGS_amx_int8 ${NARROWFLOAT_FLAGS_amx_bf16} -mamx-int8)

# Adds sources to the library; call it in their directory.
function(narrowfloat_vector_level level)
  if(NOT NARROWFLOAT_VECTOR_LEVELS)
    return()
  endif()
  # Loops over registers have to be unrolled for sums to stay in them; with sanitizers they need not.
  set(flags ${NARROWFLOAT_FLAGS_${level}})
  if(NOT NARROWFLOAT_SANITIZE)
    list(APPEND flags $<$<CONFIG:RelWithDebInfo>:-O3>)
  endif()
  if(CMAKE_CXX_COMPILER_ID STREQUAL GNU)
    # g++ 12 takes the undefined operands of its own intrinsics for uninitialised variables.
    list(APPEND flags -Wno-uninitialized -Wno-maybe-uninitialized)
  endif()
  target_sources(narrowfloat PRIVATE ${ARGN})
  set_source_files_properties(${ARGN} TARGET_DIRECTORY narrowfloat
                              PROPERTIES COMPILE_OPTIONS "${flags}" SKIP_UNITY_BUILD_INCLUSION ON)
endfunction()
