# Unity builds (CMAKE_UNITY_BUILD=ON, as the presets of test.sh have it): up to 12 sources of a
# target compile as one, which takes a third of the time. The library's sources compile in groups of
# any size. A group is a folder. In src/ops, where the implementations of one operation have
# functions of the same names, it is one implementation of all operations; those for GPUs and for
# levels of vector instructions compile alone.
set(CMAKE_UNITY_BUILD_BATCH_SIZE 12)

function(narrowfloat_unity_groups target)
  get_target_property(sources ${target} SOURCES)
  foreach(source IN LISTS sources)
    if(NOT source MATCHES "\\.cpp$" OR source MATCHES "(/sm[89]0/|_sm90\\.cpp$|/x86/)")
      continue()
    endif()
    cmake_path(GET source PARENT_PATH folder)
    if(source MATCHES "/ops/.*(_cpu|_baseline)\\.cpp$")
      set(group ops${CMAKE_MATCH_1})
    elseif(source MATCHES "/ops/")
      set(group ops)
    else()
      cmake_path(GET folder FILENAME group)
    endif()
    set_source_files_properties(${source} TARGET_DIRECTORY ${target}
                                PROPERTIES UNITY_GROUP ${group})
    list(APPEND groups ${group})
  endforeach()
  list(REMOVE_DUPLICATES groups)
  set_target_properties(${target} PROPERTIES UNITY_BUILD_MODE GROUP)
  if(NARROWFLOAT_SANITIZE)
    narrowfloat_optimise_only_arithmetic(${target} "${groups}")
  endif()
endfunction()

# With sanitizers a unit takes twice as long to compile with -O1 as with -O0, and only arithmetic
# takes time when it runs. CMake compiles sources with options of their own alone, so the options
# belong to the units that it makes.
function(narrowfloat_optimise_only_arithmetic target groups)
  foreach(group IN LISTS groups)
    if(NOT group MATCHES "^(formats|ops|tensor)")
      set_source_files_properties(
        ${CMAKE_CURRENT_BINARY_DIR}/CMakeFiles/${target}.dir/Unity/unity_${group}_cxx.cxx
        PROPERTIES COMPILE_OPTIONS -O0)
    endif()
  endforeach()
endfunction()
