# Installs the library, its public headers, the command line program, the licence, and a package for
# find_package(narrowfloat). A project that includes narrowfloat installs nothing of it.
if(NOT PROJECT_IS_TOP_LEVEL)
  return()
endif()
include(CMakePackageConfigHelpers)
include(GNUInstallDirs)
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/narrowfloat)

install(
  TARGETS narrowfloat
  EXPORT narrowfloatTargets
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
  FILE_SET HEADERS DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(EXPORT narrowfloatTargets NAMESPACE narrowfloat:: DESTINATION ${package_dir})
if(TARGET narrowfloat_cli)
  install(TARGETS narrowfloat_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()

configure_package_config_file(
  ${PROJECT_SOURCE_DIR}/cmake/narrowfloatConfig.cmake.in
  ${PROJECT_BINARY_DIR}/narrowfloatConfig.cmake INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/narrowfloatConfigVersion.cmake
                                 COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/narrowfloatConfig.cmake
              ${PROJECT_BINARY_DIR}/narrowfloatConfigVersion.cmake DESTINATION ${package_dir})
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})
