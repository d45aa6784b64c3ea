# Installs one library of BUILD_DIR (narrowfloat or narrowfloat_shared) into WORK_DIR/prefix, builds
# programs against it, one with find_package(narrowfloat) and one with pkg-config, and runs them.
# COMPONENT names the library's component; it is empty for the library that an installation has by
# default, which comes with the PROGRAMS, paths separated by commas.
set(prefix ${WORK_DIR}/prefix)
set(library_dir ${prefix}/${LIBRARY_DIR})
file(REMOVE_RECURSE ${WORK_DIR})

function(step)
  list(JOIN ARGV " " command)
  message(STATUS "${command}")
  execute_process(COMMAND ${ARGV} COMMAND_ERROR_IS_FATAL ANY)
endfunction()

if(COMPONENT)
  step(${CMAKE_COMMAND} --install ${BUILD_DIR} --prefix ${prefix} --component ${COMPONENT})
else()
  step(${CMAKE_COMMAND} --install ${BUILD_DIR} --prefix ${prefix})
  string(REPLACE "," ";" programs "${PROGRAMS}")
  foreach(program IN LISTS programs)
    step(${prefix}/${program} --version)
    get_filename_component(name ${program} NAME)
    foreach(file man/man1/${name}.1 bash-completion/completions/${name}
                 zsh/site-functions/_${name} fish/vendor_completions.d/${name}.fish)
      file(SIZE ${prefix}/share/${file} size) # Fails if it is not there.
      if(size LESS 1000)
        message(FATAL_ERROR "share/${file} has ${size} bytes")
      endif()
    endforeach()
  endforeach()
endif()

if(LIBRARY STREQUAL "narrowfloat_shared")
  step(${PYTHON} ${CMAKE_CURRENT_LIST_DIR}/check_shared_library.py ${library_dir}/libnarrowfloat.so
       --soname ${SONAME} --headers ${prefix}/include/narrowfloat)
  # A program that links the shared library needs no development files of the dependencies.
  set(without_dependencies -DCMAKE_DISABLE_FIND_PACKAGE_TBB=ON -DCMAKE_DISABLE_FIND_PACKAGE_fmt=ON)
endif()

# A copy outside the source tree, so that nothing but the installed package can be found.
file(COPY ${SOURCE_DIR}/examples DESTINATION ${WORK_DIR})
step(${CMAKE_COMMAND} -S ${WORK_DIR}/examples -B ${WORK_DIR}/build -G ${GENERATOR}
     -DCMAKE_PREFIX_PATH=${prefix} -DCMAKE_BUILD_TYPE=${BUILD_TYPE}
     -DCMAKE_CXX_COMPILER=${CXX_COMPILER} ${without_dependencies})
step(${CMAKE_COMMAND} --build ${WORK_DIR}/build --target example_01_roundtrip)
step(${WORK_DIR}/build/01_roundtrip)
step(${CMAKE_COMMAND} --build ${WORK_DIR}/build --target example_05_c_api)
step(${WORK_DIR}/build/05_c_api)

set(ENV{PKG_CONFIG_PATH} ${library_dir}/pkgconfig)
execute_process(COMMAND ${PKG_CONFIG} --cflags --libs narrowfloat OUTPUT_VARIABLE flags
                COMMAND_ERROR_IS_FATAL ANY)
separate_arguments(flags UNIX_COMMAND "${flags}")
step(${CXX_COMPILER} -std=c++20 ${CMAKE_CURRENT_LIST_DIR}/catch_error.cpp -o
     ${WORK_DIR}/catch_error ${flags})
set(ENV{LD_LIBRARY_PATH} ${library_dir}:$ENV{LD_LIBRARY_PATH})
step(${WORK_DIR}/catch_error)
