// The rest of the program is a library, which tests of its command line link, too.
#include "cli/commands.h"

int main(int argc, char** argv) { return narrowfloat::cli::run(argc, argv); }
