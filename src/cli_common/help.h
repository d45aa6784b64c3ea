// Texts that follow from the table of commands and options which parses the command line: help,
// completion for shells, a manual page, and suggestions for mistyped words.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <CLI/CLI.hpp>

#include "cli_common/output.h"

namespace narrowfloat::cli {

// Columns of the terminal at stdout, or of $COLUMNS, within reason; 100 where neither is known.
size_t help_width();

// Breaks lines at blanks so that they have at most `width` columns, and indents all but the first.
std::string wrapped(std::string_view text, size_t width, size_t indent);

// Help whose descriptions and paragraphs fit `width` columns. Lines of examples, which begin with a
// blank, stay as they are.
std::shared_ptr<CLI::FormatterBase> make_help_formatter(size_t width);

// Returns `option`, with the words that it takes, "a, b, c", for completion.
CLI::Option* with_words(CLI::Option* option, std::string_view words);

// The one of `candidates` that `word` was probably meant to be; empty if none is near.
std::string closest_word(std::string_view word, const std::vector<std::string>& candidates);

// A script that completes commands, options and the words that options take.
std::string bash_completion(const CLI::App& app);
std::string zsh_completion(const CLI::App& app);
std::string fish_completion(const CLI::App& app);

// A page for man(1), in roff.
std::string manual_page(const CLI::App& app, std::string_view version);

// The name of `app` with those of the groups that it is in, but not the program's: "moe tune".
std::string command_words(const CLI::App& app);

}  // namespace narrowfloat::cli
