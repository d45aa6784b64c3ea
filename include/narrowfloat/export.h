// The mark of what the shared library exports: all else in it is hidden. A public function, or a
// class whose members are defined in the library, carries it at its declaration. One definition
// serves the library and those who use it, and the static library as well.
#pragma once

#define NARROWFLOAT_API __attribute__((visibility("default")))
