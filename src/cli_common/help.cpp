// The words that an option takes are kept as CLI11's type name, "{auto,always,never}", which help
// does not show where an option has a text of its own.
#include "cli_common/help.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <functional>
#include <memory>
#include <numeric>
#include <sys/ioctl.h>
#include <unistd.h>

#include <fmt/format.h>

namespace narrowfloat::cli {
namespace {

constexpr size_t kDefaultWidth = 100;
constexpr size_t kNarrowest = 40;
constexpr size_t kWidest = 160;
constexpr size_t kOptionColumn = 30;
constexpr size_t kShortestDescription = 20;

std::string repeated(char c, size_t count) { return std::string(count, c); }

std::vector<std::string_view> lines_of(std::string_view text) {
  std::vector<std::string_view> lines;
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size());
    lines.push_back(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return lines;
}

class HelpFormatter : public CLI::Formatter {
 public:
  explicit HelpFormatter(size_t width) : width_(width) { column_width(kOptionColumn); }

  std::string make_option(const CLI::Option* option, bool is_positional) const override {
    return two_columns(make_option_name(option, is_positional) + make_option_opts(option),
                       make_option_desc(option));
  }
  std::string make_subcommand(const CLI::App* command) const override {
    return two_columns(command->get_display_name(true), command->get_description());
  }
  std::string make_description(const CLI::App* app) const override {
    return paragraphs(app->get_description());
  }
  std::string make_footer(const CLI::App* app) const override {
    return paragraphs(app->get_footer());
  }

 private:
  // As CLI11 prints them, but wrapped.
  [[nodiscard]] std::string two_columns(const std::string& name,
                                        const std::string& description) const {
    std::string text = "  " + name;
    while (text.ends_with(' ')) text.pop_back();
    if (description.empty()) return text + "\n";
    const size_t indent = std::min(kOptionColumn, width_ - kShortestDescription);
    text += text.size() + 1 > indent ? "\n" + repeated(' ', indent)
                                     : repeated(' ', indent - text.size());
    return text + wrapped(description, width_ - indent, indent) + "\n";
  }

  [[nodiscard]] std::string paragraphs(std::string_view text) const {
    std::string result;
    for (const std::string_view line : lines_of(text)) {
      result += line.starts_with(' ') ? std::string(line) : wrapped(line, width_, 0);
      result += '\n';
    }
    return result;
  }

  size_t width_;
};

// Visits `app` and all commands below it.
void for_each_command(const CLI::App& app, const std::function<void(const CLI::App&)>& visit) {
  visit(app);
  for (const CLI::App* command : app.get_subcommands({})) for_each_command(*command, visit);
}

std::vector<std::string> option_words(const CLI::Option& option) {
  const std::string type = option.get_type_name();
  std::vector<std::string> words;
  if (!type.starts_with('{') || !type.ends_with('}')) return words;
  std::string word;
  for (const char c : type.substr(1)) {
    if (c == ',' || c == '}') {
      words.push_back(std::exchange(word, {}));
    } else {
      word += c;
    }
  }
  return words;
}

// "--json", "-q": all names of an option with their dashes.
std::vector<std::string> option_names(const CLI::Option& option) {
  std::vector<std::string> names;
  for (const std::string& name : option.get_lnames()) names.push_back("--" + name);
  for (const std::string& name : option.get_snames()) names.push_back("-" + name);
  return names;
}

std::vector<const CLI::Option*> named_options(const CLI::App& app) {
  return app.get_options([](const CLI::Option* option) { return option->nonpositional(); });
}

std::vector<std::string> command_names(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::App* command : app.get_subcommands({})) names.push_back(command->get_name());
  return names;
}

// Within single quotes of a shell.
std::string shell_quoted(std::string_view text) {
  std::string quoted = "'";
  for (const char c : text) quoted += c == '\'' ? "'\\''" : std::string(1, c);
  return quoted + "'";
}

// "narrowfloat_bench": a name of a shell function.
std::string function_name(std::string name) {
  std::replace(name.begin(), name.end(), '-', '_');
  return "_" + name;
}

// The first sentence, for lists of completions.
std::string first_sentence(std::string_view text) {
  const size_t end = std::min({text.find(". "), text.find('\n'), text.find("; "), text.size()});
  return std::string(text.substr(0, end));
}

// The lines of a `case` that follow which command the words before the cursor name.
std::string command_cases(const CLI::App& app) {
  std::string text;
  for_each_command(app, [&](const CLI::App& command) {
    const std::string words = command_words(command);
    if (words.empty()) return;
    const size_t space = words.rfind(' ');
    const std::string group = space == std::string::npos ? "" : words.substr(0, space);
    text += fmt::format("      {}) command={} ;;\n", shell_quoted(group + ":" + command.get_name()),
                        shell_quoted(words));
  });
  return text;
}

std::string joined(const std::vector<std::string>& words) {
  return fmt::format("{}", fmt::join(words, " "));
}

// A backslash and a leading dot or quote have a meaning in roff.
std::string roff(std::string_view text) {
  std::string escaped;
  bool is_line_start = true;
  for (const char c : text) {
    if (is_line_start && (c == '.' || c == '\'')) escaped += "\\&";
    if (c == '\\') {
      escaped += "\\e";
    } else if (c == '-') {
      escaped += "\\-";
    } else {
      escaped += c;
    }
    is_line_start = c == '\n';
  }
  return escaped;
}

std::string roff_options(const CLI::App& app) {
  std::string text;
  for (const CLI::Option* option : app.get_options()) {
    std::string names = option->nonpositional()
                            ? fmt::format("{}", fmt::join(option_names(*option), ", "))
                            : option->get_name(true, false);
    std::string value = option->nonpositional() ? option->get_option_text() : "";
    if (const size_t required = value.find("REQUIRED"); required != std::string::npos) {
      value.erase(required);
    }
    while (value.ends_with(' ')) value.pop_back();
    text += fmt::format(".TP\n\\fB{}\\fR{}{}\n{}\n", roff(names), value.empty() ? "" : " ",
                        value.empty() ? "" : "\\fI" + roff(value) + "\\fR",
                        roff(option->get_description()));
  }
  return text;
}

// Lines that begin with a blank are examples.
std::string roff_paragraphs(std::string_view text) {
  std::string result;
  bool is_example = false;
  for (const std::string_view line : lines_of(text)) {
    if (line.starts_with(' ') != is_example) {
      is_example = !is_example;
      result += is_example ? ".nf\n" : ".fi\n";
    }
    result += line.empty() ? ".PP\n" : roff(line) + "\n";
  }
  return result + (is_example ? ".fi\n" : "");
}

}  // namespace

size_t help_width() {
  const char* const columns = std::getenv("COLUMNS");
  size_t width = 0;
  if (columns != nullptr) {
    const std::string_view text = columns;
    std::from_chars(text.data(), text.data() + text.size(), width);
  }
  winsize size{};
  if (width == 0 && ::isatty(STDOUT_FILENO) == 1 &&
      ::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0) {
    width = size.ws_col;
  }
  return width == 0 ? kDefaultWidth : std::clamp(width, kNarrowest, kWidest);
}

std::string wrapped(std::string_view text, size_t width, size_t indent) {
  std::string result;
  size_t column = 0;
  while (!text.empty()) {
    const size_t end = std::min(text.find(' '), text.size());
    const std::string_view word = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    if (word.empty()) continue;
    const size_t columns = display_width(word);
    if (column > 0 && column + 1 + columns > width) {
      result += "\n" + repeated(' ', indent);
      column = 0;
    } else if (column > 0) {
      result += ' ';
      ++column;
    }
    result += word;
    column += columns;
  }
  return result;
}

std::shared_ptr<CLI::FormatterBase> make_help_formatter(size_t width) {
  return std::make_shared<HelpFormatter>(width);
}

CLI::Option* with_words(CLI::Option* option, std::string_view words) {
  std::string type = "{";
  for (const char c : words) {
    if (c != ' ') type += c;
  }
  return option->type_name(type + "}");
}

std::string closest_word(std::string_view word, const std::vector<std::string>& candidates) {
  std::string closest;
  // One mistake for every three letters.
  size_t least = word.size() / 3 + 1;
  for (const std::string& candidate : candidates) {
    // The edit distance, row by row.
    std::vector<size_t> row(candidate.size() + 1);
    std::iota(row.begin(), row.end(), size_t{0});
    for (size_t i = 0; i < word.size(); ++i) {
      size_t diagonal = row[0];
      row[0] = i + 1;
      for (size_t j = 0; j < candidate.size(); ++j) {
        const size_t replaced = diagonal + (word[i] == candidate[j] ? 0 : 1);
        diagonal = row[j + 1];
        row[j + 1] = std::min({replaced, row[j] + 1, row[j + 1] + 1});
      }
    }
    if (row.back() < least) {
      least = row.back();
      closest = candidate;
    }
  }
  return closest;
}

std::string command_words(const CLI::App& app) {
  if (app.get_parent() == nullptr) return "";
  const std::string group = command_words(*app.get_parent());
  return group.empty() ? app.get_name() : group + " " + app.get_name();
}

// Files are completed where neither a command, nor an option, nor a word of one is expected.
std::string bash_completion(const CLI::App& app) {
  const std::string function = function_name(app.get_name());
  std::string words_of_options;
  std::string options;
  std::string commands;
  for_each_command(app, [&](const CLI::App& command) {
    const std::string words = command_words(command);
    std::vector<std::string> names;
    for (const CLI::Option* option : named_options(command)) {
      for (const std::string& name : option_names(*option)) {
        names.push_back(name);
        const std::vector<std::string> values = option_words(*option);
        if (values.empty()) continue;
        words_of_options +=
            fmt::format("    {}) words={} ;;\n", shell_quoted(fmt::format("{}:{}", words, name)),
                        shell_quoted(joined(values)));
      }
    }
    options +=
        fmt::format("      {}) words={} ;;\n", shell_quoted(words), shell_quoted(joined(names)));
    const std::vector<std::string> below = command_names(command);
    if (below.empty()) return;
    commands +=
        fmt::format("      {}) words={} ;;\n", shell_quoted(words), shell_quoted(joined(below)));
  });
  return fmt::format(R"(# Completion of {0} for bash, made by `{0} completion bash`.
{1}() {{
  local cur=${{COMP_WORDS[COMP_CWORD]}} prev=${{COMP_WORDS[COMP_CWORD-1]}} command= word words=
  for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
    case "$command:$word" in
{2}    esac
  done
  case "$command:$prev" in
{3}  esac
  if [[ -z $words && $cur == -* ]]; then
    case "$command" in
{4}    esac
  elif [[ -z $words ]]; then
    case "$command" in
{5}    esac
  fi
  mapfile -t COMPREPLY < <(compgen -W "$words" -- "$cur")
}}
complete -o default -F {1} {0}
)",
                     app.get_name(), function, command_cases(app), words_of_options, options,
                     commands);
}

std::string zsh_completion(const CLI::App& app) {
  const std::string function = function_name(app.get_name());
  std::string words_of_options;
  std::string options;
  std::string commands;
  const auto described = [](const std::string& name, const std::string& description) {
    std::string text = name;
    std::replace(text.begin(), text.end(), ':', ' ');
    return shell_quoted(text + ":" + first_sentence(description));
  };
  for_each_command(app, [&](const CLI::App& command) {
    const std::string words = command_words(command);
    std::vector<std::string> names;
    for (const CLI::Option* option : named_options(command)) {
      for (const std::string& name : option_names(*option)) {
        names.push_back(described(name, option->get_description()));
        const std::vector<std::string> values = option_words(*option);
        if (values.empty()) continue;
        words_of_options +=
            fmt::format("    {}) compadd -- {}; return ;;\n",
                        shell_quoted(fmt::format("{}:{}", words, name)), joined(values));
      }
    }
    options += fmt::format("      {}) list=({}) ;;\n", shell_quoted(words), joined(names));
    std::vector<std::string> below;
    for (const CLI::App* sub : command.get_subcommands({})) {
      below.push_back(described(sub->get_name(), sub->get_description()));
    }
    if (below.empty()) return;
    commands += fmt::format("      {}) list=({}) ;;\n", shell_quoted(words), joined(below));
  });
  return fmt::format(R"(#compdef {0}
# Completion of {0} for zsh, made by `{0} completion zsh`.
{1}() {{
  local command= word
  local -a list
  for word in "${{(@)words[2,CURRENT-1]}}"; do
    case "$command:$word" in
{2}    esac
  done
  case "$command:${{words[CURRENT-1]}}" in
{3}  esac
  if [[ ${{words[CURRENT]}} == -* ]]; then
    case "$command" in
{4}    esac
    _describe option list
    return
  fi
  case "$command" in
{5}  esac
  if (( $#list )); then _describe command list; else _files; fi
}}
if [[ $funcstack[1] == {1} ]]; then {1} "$@"; else compdef {1} {0}; fi
)",
                     app.get_name(), function, command_cases(app), words_of_options, options,
                     commands);
}

std::string fish_completion(const CLI::App& app) {
  std::string text =
      fmt::format("# Completion of {0} for fish, made by `{0} completion fish`.\n", app.get_name());
  for_each_command(app, [&](const CLI::App& command) {
    // The command's own words are there, and those of no command below it.
    const std::string words = command_words(command);
    std::string condition;
    for (const std::string_view word : {std::string_view(words)}) {
      std::string rest(word);
      while (!rest.empty()) {
        const size_t end = std::min(rest.find(' '), rest.size());
        condition += fmt::format("{}__fish_seen_subcommand_from {}",
                                 condition.empty() ? "" : "; and ", rest.substr(0, end));
        rest.erase(0, std::min(end + 1, rest.size()));
      }
    }
    const std::vector<std::string> below = command_names(command);
    if (!below.empty()) {
      condition += fmt::format("{}not __fish_seen_subcommand_from {}",
                               condition.empty() ? "" : "; and ", joined(below));
    }
    const std::string start =
        fmt::format("complete -c {} -n {}", app.get_name(), shell_quoted(condition));
    for (const CLI::App* sub : command.get_subcommands({})) {
      text += fmt::format("{} -f -a {} -d {}\n", start, sub->get_name(),
                          shell_quoted(first_sentence(sub->get_description())));
    }
    for (const CLI::Option* option : named_options(command)) {
      std::string line = start;
      for (const std::string& name : option->get_lnames()) line.append(" -l ").append(name);
      for (const std::string& name : option->get_snames()) line.append(" -s ").append(name);
      const std::vector<std::string> values = option_words(*option);
      if (!values.empty()) {
        line += " -x -a " + shell_quoted(joined(values));
      } else if (option->get_items_expected_max() > 0) {
        line += " -r";
      }
      text += line + " -d " + shell_quoted(first_sentence(option->get_description())) + "\n";
    }
  });
  return text;
}

std::string manual_page(const CLI::App& app, std::string_view version) {
  std::string upper = app.get_name();
  std::transform(upper.begin(), upper.end(), upper.begin(),
                 [](unsigned char c) { return static_cast<char>(std::toupper(c)); });
  std::string description = app.get_description();
  std::replace(description.begin(), description.end(), '\n', ' ');
  std::string text = fmt::format(
      ".TH {0} 1 \"\" \"narrowfloat {1}\"\n.SH NAME\n{2} \\- {3}\n.SH SYNOPSIS\n.B {2}\n"
      ".I COMMAND\n[options]\n.SH DESCRIPTION\n{4}\n{5}.SH OPTIONS\n{6}.SH COMMANDS\n",
      upper, version, roff(app.get_name()), roff(first_sentence(description)), roff(description),
      roff_paragraphs(app.get_footer()), roff_options(app));
  for_each_command(app, [&](const CLI::App& command) {
    if (command.get_parent() == nullptr) return;
    text += fmt::format(".SS {}\n{}\n{}.PP\n{}", roff(command_words(command)),
                        roff(command.get_description()), roff_options(command),
                        roff_paragraphs(command.get_footer()));
  });
  return text;
}

}  // namespace narrowfloat::cli
