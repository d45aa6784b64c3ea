# These functions read a list of CMAKE_CUDA_ARCHITECTURES and say what nvcc makes (decision 0039).

# narrowfloat_check_architectures(LIST): ends with the first entry that is none, or contradicts
# another.
function(narrowfloat_check_architectures architectures)
  foreach(architecture IN LISTS architectures)
    if(NOT architecture MATCHES "^(90|100|103)a(-real)?$"
       AND NOT architecture MATCHES "^([89][0-9]|1[0-9][0-9])(-real|-virtual)?$")
      message(
        FATAL_ERROR
          "CMAKE_CUDA_ARCHITECTURES: expected 90a-real, 100a-real, 103a-real, or numbers from 80 on "
          "with -real, -virtual or neither, got ${architecture}")
    endif()
    # A GPU that both fit would run the driver's choice.
    string(REGEX MATCH "^[0-9]+" number ${architecture})
    if(architecture MATCHES "^[0-9]+a" AND architectures MATCHES "(^|;)${number}(-real)?(;|$)")
      message(FATAL_ERROR "CMAKE_CUDA_ARCHITECTURES: expected either ${number}a or ${number}, got "
                          "both: ${architectures}")
    endif()
  endforeach()
endfunction()

# narrowfloat_split_architectures(LIST OWN FLAGS): sets the variable OWN to the architectures that
# kernels have code of their own for, which CMake tells nvcc, or to OFF, and FLAGS to options of
# nvcc for the others. All portable machine code is made from one PTX, of compute capability 8.0, so
# that another GPU costs its machine code alone and runs what was tested on the first.
function(narrowfloat_split_architectures architectures own_variable flags_variable)
  set(own "")
  set(from_80 "")
  set(flags "")
  foreach(architecture IN LISTS architectures)
    string(REGEX MATCH "^[0-9]+" number ${architecture})
    if(architecture MATCHES "^[0-9]+a")
      list(APPEND own ${architecture})
      continue()
    endif()
    if(NOT architecture MATCHES "-virtual$")
      list(APPEND from_80 sm_${number})
    endif()
    if(NOT architecture MATCHES "-real$")
      if(number EQUAL 80)
        list(APPEND from_80 compute_80)
      else()
        string(APPEND flags " --generate-code=arch=compute_${number},code=[compute_${number}]")
      endif()
    endif()
  endforeach()
  if(from_80)
    list(JOIN from_80 "," codes)
    string(APPEND flags " --generate-code=arch=compute_80,code=[${codes}]")
  endif()
  if(NOT own)
    set(own OFF)
  endif()
  set(${own_variable} "${own}" PARENT_SCOPE)
  set(${flags_variable} "${flags}" PARENT_SCOPE)
endfunction()
