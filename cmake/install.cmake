# Installs a library, its public headers, packages for find_package(narrowfloat) and pkg-config, the
# programs and the licences. A project that contains narrowfloat installs nothing of it. The emulated
# GPU is for tests in the build tree, so that there is nothing to install either.
if(NOT PROJECT_IS_TOP_LEVEL OR NARROWFLOAT_EMULATED_GPU)
  return()
endif()
include(CMakePackageConfigHelpers)
include(GNUInstallDirs)

# narrowfloat_install_library(library arguments...): the library is `narrowfloat` or
# `narrowfloat_shared`; an installation has one of them. The arguments name the component of its
# files.
function(narrowfloat_install_library library)
  set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/narrowfloat)
  set(generated_dir ${PROJECT_BINARY_DIR}/install/${library})
  # Whoever links a static library links what it needs, too; a shared library finds that itself.
  get_target_property(type ${library} TYPE)
  if(type STREQUAL "STATIC_LIBRARY")
    set(is_static ON)
    set(pkg_config_requires "tbb fmt")
    if(NARROWFLOAT_CUDA)
      set(pkg_config_libs "-L${CUDAToolkit_LIBRARY_DIR} -lcudart_static -lrt -ldl -pthread")
    endif()
  endif()

  install(
    TARGETS ${library}
    EXPORT ${library}Targets ${ARGN}
    ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
    LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
    FILE_SET HEADERS DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
  install(EXPORT ${library}Targets NAMESPACE narrowfloat::
          DESTINATION ${package_dir} ${ARGN})
  configure_package_config_file(
    ${PROJECT_SOURCE_DIR}/cmake/narrowfloatConfig.cmake.in ${generated_dir}/narrowfloatConfig.cmake
    INSTALL_DESTINATION ${package_dir})
  write_basic_package_version_file(${generated_dir}/narrowfloatConfigVersion.cmake
                                   COMPATIBILITY SameMinorVersion)
  install(FILES ${generated_dir}/narrowfloatConfig.cmake
                ${generated_dir}/narrowfloatConfigVersion.cmake DESTINATION ${package_dir} ${ARGN})

  cmake_path(RELATIVE_PATH CMAKE_INSTALL_PREFIX BASE_DIRECTORY
             ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig OUTPUT_VARIABLE prefix_from_pkg_config)
  configure_file(${PROJECT_SOURCE_DIR}/cmake/narrowfloat.pc.in ${generated_dir}/narrowfloat.pc
                 @ONLY)
  install(FILES ${generated_dir}/narrowfloat.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig
          ${ARGN})
endfunction()

if(BUILD_SHARED_LIBS)
  set(installed_library narrowfloat_shared)
  set(other_library narrowfloat)
else()
  set(installed_library narrowfloat)
  set(other_library narrowfloat_shared)
endif()
narrowfloat_install_library(${installed_library})
if(NARROWFLOAT_TESTS)
  # The tests in tests/install install this one by the name of its component.
  narrowfloat_install_library(${other_library} COMPONENT ${other_library} EXCLUDE_FROM_ALL)
endif()

# A program, with its manual page and its completions for shells, which it prints itself.
function(narrowfloat_install_program target)
  install(TARGETS ${target} RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
  if(CMAKE_CROSSCOMPILING)
    return()
  endif()
  get_target_property(name ${target} OUTPUT_NAME)
  set(generated_dir ${PROJECT_BINARY_DIR}/install/${name})
  set(places "man:man/man1/${name}.1" "completion bash:bash-completion/completions/${name}"
             "completion zsh:zsh/site-functions/_${name}"
             "completion fish:fish/vendor_completions.d/${name}.fish")
  foreach(place IN LISTS places)
    string(REGEX MATCH "^(.*):(.*)/([^/]*)$" matched ${place})
    set(file ${generated_dir}/${CMAKE_MATCH_2}/${CMAKE_MATCH_3})
    install(CODE "file(MAKE_DIRECTORY \"${generated_dir}/${CMAKE_MATCH_2}\")
                  separate_arguments(words UNIX_COMMAND \"${CMAKE_MATCH_1}\")
                  execute_process(COMMAND \"$<TARGET_FILE:${target}>\" \${words}
                                  OUTPUT_FILE \"${file}\" COMMAND_ERROR_IS_FATAL ANY)")
    install(FILES ${file} DESTINATION ${CMAKE_INSTALL_DATADIR}/${CMAKE_MATCH_2})
  endforeach()
endfunction()
if(NARROWFLOAT_CLI)
  narrowfloat_install_program(narrowfloat_cli)
endif()
if(NARROWFLOAT_BENCH)
  narrowfloat_install_program(narrowfloat_bench_cli)
endif()
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE
              ${PROJECT_SOURCE_DIR}/python/packaging/THIRD_PARTY_LICENSES.txt
        DESTINATION ${CMAKE_INSTALL_DOCDIR})
