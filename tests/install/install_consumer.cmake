# Installs BUILD_DIR into WORK_DIR/prefix, configures SOURCE_DIR/examples as a project of its own
# against it, builds and runs 01_roundtrip. Any failing step fails the test.
set(prefix ${WORK_DIR}/prefix)
file(REMOVE_RECURSE ${WORK_DIR})

function(step)
  list(JOIN ARGV " " command)
  message(STATUS "${command}")
  execute_process(COMMAND ${ARGV} COMMAND_ERROR_IS_FATAL ANY)
endfunction()

step(${CMAKE_COMMAND} --install ${BUILD_DIR} --prefix ${prefix})
foreach(path include/narrowfloat/narrowfloat.h bin/narrowfloat)
  if(NOT EXISTS ${prefix}/${path})
    message(FATAL_ERROR "not installed: ${path}")
  endif()
endforeach()
# A copy outside the source tree, so that nothing but the installed package can be found.
file(COPY ${SOURCE_DIR}/examples DESTINATION ${WORK_DIR})
step(${CMAKE_COMMAND} -S ${WORK_DIR}/examples -B ${WORK_DIR}/build -G ${GENERATOR}
     -DCMAKE_PREFIX_PATH=${prefix} -DCMAKE_BUILD_TYPE=${BUILD_TYPE}
     -DCMAKE_CXX_COMPILER=${CXX_COMPILER})
step(${CMAKE_COMMAND} --build ${WORK_DIR}/build --target example_01_roundtrip)
step(${WORK_DIR}/build/01_roundtrip)
