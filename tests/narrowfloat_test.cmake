# narrowfloat_test(NAME <name> LABEL <label> SHARDS <count> SOURCES <files...>): a GoogleTest
# executable in <build>/tests/bin. With ctest its cases run under its label (default: unit) in
# SHARDS processes (default: 4), each of which takes every SHARDS-th case: a process for each case
# would take longer to start than to run, with sanitizers. The sanitizer build runs the `unit`
# tests; they see the internal headers. Tests labelled `gpu` need a GPU and skip without one; the
# target `gpu_tests` builds them.
find_package(GTest REQUIRED)
add_custom_target(unit_tests)
add_custom_target(gpu_tests)

# Tests take most of their time in the library and in tests/support, which are compiled with the
# options of the configuration; optimising the rest would cost more than it saves.
add_library(test_options INTERFACE)
target_link_libraries(test_options INTERFACE test_support)
if(NARROWFLOAT_SANITIZE)
  set(optimisation -O0)
else()
  set(optimisation $<$<CONFIG:Release>:-O1>)
endif()
target_compile_options(test_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:${optimisation}>)

function(narrowfloat_test)
  cmake_parse_arguments(arg "" "NAME;LABEL;SHARDS" "SOURCES" ${ARGN})
  if(NOT arg_LABEL)
    set(arg_LABEL unit)
  endif()
  if(NOT arg_SHARDS)
    set(arg_SHARDS 4)
  endif()
  add_executable(${arg_NAME} ${arg_SOURCES})
  set_target_properties(${arg_NAME} PROPERTIES RUNTIME_OUTPUT_DIRECTORY
                                               ${PROJECT_BINARY_DIR}/tests/bin)
  target_link_libraries(${arg_NAME} PRIVATE test_options GTest::gtest_main)
  if(TARGET ${arg_LABEL}_tests)
    add_dependencies(${arg_LABEL}_tests ${arg_NAME})
  endif()
  foreach(shard RANGE 1 ${arg_SHARDS})
    math(EXPR index "${shard} - 1")
    set(test ${arg_NAME}.${shard}of${arg_SHARDS})
    add_test(NAME ${test} COMMAND ${arg_NAME})
    # A shard counts as skipped where none passed and its output ends with the skipped cases.
    set_tests_properties(
      ${test}
      PROPERTIES LABELS ${arg_LABEL}
                 TIMEOUT 1800
                 ENVIRONMENT "GTEST_TOTAL_SHARDS=${arg_SHARDS};GTEST_SHARD_INDEX=${index}"
                 SKIP_REGULAR_EXPRESSION
                 "PASSED  \\] 0 tests\\..*SKIPPED \\] [A-Za-z0-9_./]+[^A-Za-z0-9_./]*$")
  endforeach()
endfunction()
