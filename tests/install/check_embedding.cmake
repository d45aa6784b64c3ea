# Builds a program in a project that contains narrowfloat, without CLI11, and checks that nothing of
# narrowfloat is installed with that project. A unity build without optimisation takes the least
# time.
file(REMOVE_RECURSE ${WORK_DIR})

function(step)
  list(JOIN ARGV " " command)
  message(STATUS "${command}")
  execute_process(COMMAND ${ARGV} COMMAND_ERROR_IS_FATAL ANY)
endfunction()

step(${CMAKE_COMMAND} -S ${CMAKE_CURRENT_LIST_DIR}/embedding -B ${WORK_DIR}/build -G ${GENERATOR}
     -DNARROWFLOAT_DIR=${SOURCE_DIR} -DCMAKE_CXX_COMPILER=${CXX_COMPILER}
     -DCMAKE_DISABLE_FIND_PACKAGE_CLI11=ON -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS_DEBUG=-O0
     -DCMAKE_UNITY_BUILD=ON)
step(${CMAKE_COMMAND} --build ${WORK_DIR}/build --parallel 2 --target embedded_roundtrip)
step(${WORK_DIR}/build/embedded_roundtrip)

step(${CMAKE_COMMAND} --install ${WORK_DIR}/build --prefix ${WORK_DIR}/prefix)
file(GLOB installed ${WORK_DIR}/prefix/*)
if(installed)
  message(FATAL_ERROR "installed: ${installed}")
endif()
