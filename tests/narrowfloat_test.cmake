# narrowfloat_test(NAME <name> LABEL <label> SOURCES <files...>): a GoogleTest executable in
# <build>/tests/bin, registered test by test with ctest under its label (default: unit). The
# sanitizer build runs the `unit` tests; they see the internal headers. Tests labelled `gpu` need a
# GPU and skip without one; the target `gpu_tests` builds them.
find_package(GTest REQUIRED)
include(GoogleTest)
add_custom_target(unit_tests)
add_custom_target(gpu_tests)

# Tests take most of their time in the library and in tests/support, which are compiled with the
# options of the configuration; optimising the rest would cost more than it saves.
add_library(test_options INTERFACE)
target_link_libraries(test_options INTERFACE test_support)
target_compile_options(test_options
                       INTERFACE $<$<AND:$<CONFIG:Release>,$<COMPILE_LANGUAGE:CXX>>:-O1>)

function(narrowfloat_test)
  cmake_parse_arguments(arg "" "NAME;LABEL" "SOURCES" ${ARGN})
  if(NOT arg_LABEL)
    set(arg_LABEL unit)
  endif()
  add_executable(${arg_NAME} ${arg_SOURCES})
  set_target_properties(${arg_NAME} PROPERTIES RUNTIME_OUTPUT_DIRECTORY
                                               ${PROJECT_BINARY_DIR}/tests/bin)
  target_link_libraries(${arg_NAME} PRIVATE test_options GTest::gtest_main)
  # Discovered when ctest runs, so that a build does not depend on running its tests.
  gtest_discover_tests(${arg_NAME} NO_PRETTY_VALUES DISCOVERY_MODE PRE_TEST DISCOVERY_TIMEOUT 60
                       PROPERTIES LABELS ${arg_LABEL} TIMEOUT 600)
  if(TARGET ${arg_LABEL}_tests)
    add_dependencies(${arg_LABEL}_tests ${arg_NAME})
  endif()
endfunction()
