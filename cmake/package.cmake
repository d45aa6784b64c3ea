# `cpack` makes a Debian package: the shared library, the headers with packages for
# find_package(narrowfloat) and pkg-config, and the programs, under /usr. The preset `package` builds
# what it holds; tools/test_package.sh tries it.
if(NOT PROJECT_IS_TOP_LEVEL OR NARROWFLOAT_EMULATED_GPU OR NARROWFLOAT_PYTHON)
  return()
endif()
set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_CONTACT "The authors of narrowfloat")
set(CPACK_PACKAGE_VENDOR "narrowfloat")
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_STRIP_FILES ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SECTION libdevel)
# The libraries that the installed ones need, and ldconfig after the installation.
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_PACKAGE_GENERATE_SHLIBS ON)
include(CPack)
