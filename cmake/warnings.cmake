# Compile options of every target of this project, as the interface target narrowfloat_options.
if(NARROWFLOAT_WERROR)
  set(warnings_are_errors -Werror)
endif()
add_library(narrowfloat_options INTERFACE)
target_compile_options(
  narrowfloat_options
  INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Wall
            -Wextra
            -Wpedantic
            -Wconversion
            -Wshadow
            ${warnings_are_errors}
            # Designated initialisers leave members at their defaults on purpose.
            -Wno-missing-field-initializers
            # A false positive of g++ 12 inside fmt's parser, once it is inlined.
            $<$<CXX_COMPILER_ID:GNU>:-Wno-stringop-overflow>
            # The arithmetic is specified operation by operation: no fused multiply-add that the
            # source does not spell out (spec 4.1).
            -ffp-contract=off
            # No value depends on these two; without them loops with selects do not vectorise:
            # nobody reads floating-point exception flags or errno.
            -fno-trapping-math
            -fno-math-errno>)
if(NARROWFLOAT_SANITIZE)
  # float-cast-overflow and friends are part of "undefined"; a report must fail the test. Left out
  # are null pointers, which AddressSanitizer sees too, object-size and vptr: together they take a
  # fifth of the time to compile.
  set(sanitizers -fsanitize=${NARROWFLOAT_SANITIZE} -fno-sanitize=null,vptr,object-size
                 -fno-sanitize-recover=all -fno-omit-frame-pointer)
  target_compile_options(narrowfloat_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:${sanitizers}>)
  target_link_options(narrowfloat_options INTERFACE ${sanitizers})
endif()
