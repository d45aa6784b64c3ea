# The target `lint`: headers compile alone, clang-format, clang-tidy, tools/tidy.py. Nothing of it
# is part of `all`. Each part is also a target of its own: lint_headers, lint_format,
# lint_clang_tidy, lint_tidy; `-- -k 0` runs all parts whatever the first ones find. The target
# `format` rewrites the files as clang-format wants them.
find_program(NARROWFLOAT_CLANG_FORMAT NAMES clang-format-14 clang-format)
find_program(NARROWFLOAT_CLANG_TIDY NAMES clang-tidy-14 clang-tidy)
mark_as_advanced(NARROWFLOAT_CLANG_FORMAT NARROWFLOAT_CLANG_TIDY)

# Public headers: CMake compiles each alone. A target beside the library, so that the library itself
# is not built for it; it has no include folders but include/.
get_target_property(public_headers narrowfloat HEADER_SET)
add_library(lint_public_headers INTERFACE)
target_sources(
  lint_public_headers
  INTERFACE FILE_SET HEADERS
            BASE_DIRS ${PROJECT_SOURCE_DIR}/include
            FILES ${public_headers})
target_compile_features(lint_public_headers INTERFACE cxx_std_20)
set_target_properties(lint_public_headers PROPERTIES VERIFY_INTERFACE_HEADER_SETS ON)

# Internal headers: a source for each that includes it, twice.
set(lint_sources "")
file(GLOB_RECURSE internal_headers CONFIGURE_DEPENDS RELATIVE ${PROJECT_SOURCE_DIR}/src
     ${PROJECT_SOURCE_DIR}/src/*.h)
foreach(header IN LISTS internal_headers)
  if(header MATCHES "^runtime/cuda/" AND NOT NARROWFLOAT_CUDA)
    continue()
  endif()
  set(source ${PROJECT_BINARY_DIR}/lint_headers/${header}.cpp)
  file(CONFIGURE OUTPUT ${source} CONTENT "#include \"@header@\"\n#include \"@header@\"\n" @ONLY)
  list(APPEND lint_sources ${source})
endforeach()
add_library(lint_internal_headers OBJECT EXCLUDE_FROM_ALL ${lint_sources})
set_target_properties(lint_internal_headers PROPERTIES UNITY_BUILD OFF)
target_include_directories(lint_internal_headers PRIVATE ${PROJECT_SOURCE_DIR}/include
                                                         ${PROJECT_SOURCE_DIR}/src)
target_link_libraries(lint_internal_headers PRIVATE narrowfloat_options TBB::tbb fmt::fmt
                                                    nlohmann_json::nlohmann_json)
# A header's inline helpers need no use in the source made for it. Nobody runs the objects; leaving
# out debug symbols saves a sixth of the time.
target_compile_options(lint_internal_headers PRIVATE -O0 -g0 -Wno-unused-function)
add_custom_target(lint_headers DEPENDS lint_internal_headers)
add_dependencies(lint_headers lint_public_headers_verify_interface_header_sets)

file(
  GLOB_RECURSE lint_files CONFIGURE_DEPENDS
  ${PROJECT_SOURCE_DIR}/include/*.h
  ${PROJECT_SOURCE_DIR}/src/*.h
  ${PROJECT_SOURCE_DIR}/src/*.cpp
  ${PROJECT_SOURCE_DIR}/src/*.cu*
  ${PROJECT_SOURCE_DIR}/tests/*.h
  ${PROJECT_SOURCE_DIR}/tests/*.cpp
  ${PROJECT_SOURCE_DIR}/tests/*.cu*
  ${PROJECT_SOURCE_DIR}/python/*.h
  ${PROJECT_SOURCE_DIR}/python/*.cpp
  ${PROJECT_SOURCE_DIR}/examples/*.cpp)
add_custom_target(
  lint_format
  COMMAND ${NARROWFLOAT_CLANG_FORMAT} --dry-run --Werror ${lint_files}
  COMMENT "clang-format"
  VERBATIM USES_TERMINAL)
add_custom_target(format COMMAND ${NARROWFLOAT_CLANG_FORMAT} -i ${lint_files} VERBATIM)

add_custom_target(
  lint_clang_tidy
  COMMAND Python3::Interpreter ${PROJECT_SOURCE_DIR}/tools/run_clang_tidy.py --build-dir
          ${PROJECT_BINARY_DIR} --clang-tidy ${NARROWFLOAT_CLANG_TIDY}
  COMMENT "clang-tidy"
  VERBATIM USES_TERMINAL)

add_custom_target(
  lint_tidy
  COMMAND Python3::Interpreter ${PROJECT_SOURCE_DIR}/tools/tidy.py --self-test
  COMMAND Python3::Interpreter ${PROJECT_SOURCE_DIR}/tools/tidy.py ${PROJECT_SOURCE_DIR}
  COMMENT "tools/tidy.py"
  VERBATIM USES_TERMINAL)

add_custom_target(lint DEPENDS lint_tidy lint_format lint_headers lint_clang_tidy)
