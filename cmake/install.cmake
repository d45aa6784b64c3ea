# Installs a library, its public headers, packages for find_package(narrowfloat) and pkg-config, the
# programs and the licence. A project that contains narrowfloat installs nothing of it. The emulated
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
if(NARROWFLOAT_CLI)
  install(TARGETS narrowfloat_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()
if(NARROWFLOAT_BENCH)
  install(TARGETS narrowfloat_bench_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})
