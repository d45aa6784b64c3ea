// See report_html.h. The page has no script; it is complete without a network, and prints.
#include "cli/report_html.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <limits>
#include <set>

#include <fmt/format.h>

#include "cli/checkpoint_report.h"
#include "cli/svg_plot.h"
#include "cli_common/output.h"
#include "narrowfloat/runtime.h"

namespace narrowfloat::cli {
namespace {

constexpr std::string_view kStyle = R"(
:root{color-scheme:light dark;--bg:#fff;--fg:#1c2430;--soft:#5b6677;--line:#e2e6ec;--card:#f6f8fa;
--good:#1f7a4d;--bad:#b3261e;--warn:#8a5a00;--c0:#3b6fd4;--c1:#e07b39;--c2:#2f9e6e;--c3:#b5478f;
--c4:#8a6d3b;--c5:#6b5fd0;--c6:#c94848;--c7:#2a93a8;--c8:#7c8a2e;--c9:#6f7682}
@media(prefers-color-scheme:dark){:root{--bg:#12161c;--fg:#e6eaf0;--soft:#9aa6b6;--line:#2a323d;
--card:#1a2029;--good:#5cc795;--bad:#ff8a80;--warn:#f0bd5e;--c0:#7aa2f7;--c1:#f5a26b;--c2:#65c99b;
--c3:#e08cc2;--c4:#c9a86a;--c5:#a79bff;--c6:#f08080;--c7:#63c3d6;--c8:#b3c25c;--c9:#a4adba}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--fg);font:15px/1.5 system-ui,"Segoe UI",Roboto,
"DejaVu Sans",sans-serif}
main{max-width:1180px;margin:0 auto;padding:28px 24px 60px}
h1{font-size:26px;margin:0 0 2px;overflow-wrap:anywhere}
h2{font-size:18px;margin:38px 0 10px;padding-bottom:5px;border-bottom:1px solid var(--line)}
h3{font-size:14px;margin:0 0 6px;font-weight:600}
p{margin:6px 0;color:var(--soft);max-width:80ch}
.badge{display:inline-block;padding:1px 10px;border-radius:999px;font-size:13px;font-weight:600;
border:1px solid currentColor;vertical-align:middle;margin-left:10px}
.good{color:var(--good)}.bad{color:var(--bad)}.warn{color:var(--warn)}.soft{color:var(--soft)}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(220px,1fr));gap:12px;margin:20px 0}
.card{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:12px 14px}
.card b{display:block;font-size:22px;line-height:1.25;font-variant-numeric:tabular-nums}
.card span{color:var(--soft);font-size:13px}
.grid2{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,480px),1fr));gap:18px}
figure{margin:0;background:var(--card);border:1px solid var(--line);border-radius:10px;
padding:12px 14px;min-width:0}
figure.wide{grid-column:1/-1}
svg{display:block;width:100%;height:auto}
.grid{stroke:var(--line)}.axis{stroke:var(--soft)}
.tick{font-size:11px;fill:var(--soft)}.label{font-size:12px;fill:var(--soft)}
.curve{fill:none;stroke-width:1.8}.span{stroke-width:5;stroke-opacity:.28;stroke-linecap:round}
.threshold{stroke:var(--bad);stroke-dasharray:5 4}
.legend{display:flex;flex-wrap:wrap;gap:2px 16px;font-size:12.5px;color:var(--soft);margin-top:6px}
.legend i{display:inline-block;width:10px;height:10px;border-radius:3px;margin-right:6px}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:13.5px;font-variant-numeric:tabular-nums}
th,td{text-align:right;padding:4px 10px;border-bottom:1px solid var(--line);white-space:nowrap}
th{color:var(--soft);font-weight:600}
th:first-child,td:first-child,td.text,th.text{text-align:left}
td.long{white-space:normal;text-align:left;min-width:260px}
code,pre{font:12.5px/1.5 ui-monospace,"DejaVu Sans Mono",monospace}
pre{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:12px 14px;
overflow-x:auto;margin:8px 0}
.stack{display:flex;height:26px;border-radius:6px;overflow:hidden;margin:8px 0 4px}
.stack i{display:block;min-width:2px}
footer{margin-top:44px;color:var(--soft);font-size:13px}
)";

constexpr size_t kMaxCurves = 10;
constexpr size_t kWorstTensors = 20;
constexpr size_t kMostFindings = 100;

std::string percent(double part, double whole) {
  return fmt::format("{:.2f} %", percent_of(part, whole));
}

// "512", "65.5 k", "7.08 M": at least three digits.
std::string count_text(int64_t count) {
  constexpr std::array<std::string_view, 5> kSuffixes = {"", " k", " M", " G", " T"};
  auto value = static_cast<double>(count);
  size_t suffix = 0;
  for (; value >= 1000 && suffix + 1 < kSuffixes.size(); ++suffix) value /= 1000;
  const int decimals = suffix == 0 ? 0 : value < 10 ? 2 : value < 100 ? 1 : 0;
  return fmt::format("{:.{}f}{}", value, decimals, kSuffixes[suffix]);
}

std::string percent(int64_t part, int64_t whole) {
  return percent(static_cast<double>(part), static_cast<double>(whole));
}

std::string card(std::string_view value, std::string_view label) {
  return fmt::format("<div class=\"card\"><b>{}</b><span>{}</span></div>", html_text(value),
                     html_text(label));
}

std::string figure(std::string_view title, std::string_view content, bool is_wide = false) {
  return fmt::format("<figure{}><h3>{}</h3>{}</figure>", is_wide ? " class=\"wide\"" : "",
                     html_text(title), content);
}

std::string table(const std::vector<std::string>& head,
                  const std::vector<std::vector<std::string>>& rows, size_t long_column = 99) {
  std::string text = "<div class=\"scroll\"><table><tr>";
  for (const std::string& cell : head) text += "<th>" + html_text(cell) + "</th>";
  text += "</tr>";
  for (const auto& row : rows) {
    text += "<tr>";
    for (size_t i = 0; i < row.size(); ++i) {
      text += fmt::format("<td{}>{}</td>", i == long_column ? " class=\"long\"" : "", row[i]);
    }
    text += "</tr>";
  }
  return text + "</table></div>\n";
}

std::string code(std::string_view text) { return "<code>" + html_text(text) + "</code>"; }

std::string header(const ReportData& data) {
  const CheckpointCheck& check = data.check;
  const bool passed = check.passed();
  std::string kinds;
  for (const auto& [kind, facts] : data.kinds) {
    kinds += fmt::format("{}{} tensors {}", kinds.empty() ? "" : ", ", facts.tensors, kind);
  }
  return fmt::format("<h1>{}<span class=\"badge {}\">{}</span></h1><p>{}{}</p>",
                     html_text(data.title), passed ? "good" : "bad",
                     passed ? "check passed"
                            : fmt::format("{} errors, {} warnings", check.count(Severity::kError),
                                          check.count(Severity::kWarning)),
                     html_text(kinds),
                     data.against.empty() ? "" : "; compared with " + code(data.against));
}

std::string cards(const ReportData& data) {
  uint64_t file_bytes = 0;
  for (const StoredFile& file : data.files) file_bytes += file.size_bytes;
  std::string text = "<div class=\"cards\">";
  text += card(format_bytes(file_bytes),
               fmt::format("in {} file{}", data.files.size(), data.files.size() == 1 ? "" : "s"));
  if (data.source_bytes > 0) {
    text += card(fmt::format("{:.2f} x", static_cast<double>(data.source_bytes) /
                                             static_cast<double>(file_bytes)),
                 "smaller than " + format_bytes(data.source_bytes));
  }
  text += card(fmt::format("{:.3f}", data.quantized_total.bits_per_weight()),
               "bits per quantized weight");
  text += card(fmt::format("{:.3f}", data.all.bits_per_weight()), "bits per parameter, all");
  if (data.has_errors()) {
    const ErrorFigures& total = data.check.total;
    text += card(format_fixed(total.sqnr_db, 2) + " dB", "SQNR of all quantized weights");
    text += card(fmt::format("{:.5f}", total.cosine), "cosine");
    text += card(fmt::format("{:.5f}", total.norm_ratio), "norm ratio");
  }
  if (data.num_quantized_again > 0) {
    text += card(fmt::format("{} of {}", data.num_identical, data.num_quantized_again),
                 "weights have the bytes of quantizing the source again");
  }
  return text + "</div>\n";
}

std::string findings(const ReportData& data) {
  if (data.check.findings.empty()) return "";
  std::vector<std::vector<std::string>> rows;
  for (const Finding& finding : data.check.findings) {
    if (rows.size() == kMostFindings) break;
    const char* const tone = finding.severity == Severity::kError     ? "bad"
                             : finding.severity == Severity::kWarning ? "warn"
                                                                      : "soft";
    rows.push_back({fmt::format("<span class=\"{}\">{}</span>", tone, name(finding.severity)),
                    finding.id, code(finding.tensor),
                    html_text(with_option_spelling(finding.message))});
  }
  std::string text = "<h2>Findings</h2>" + table({"", "rule", "tensor", "finding"}, rows, 3);
  if (rows.size() < data.check.findings.size()) {
    text += fmt::format("<p>and {} more: <code>narrowfloat check -v</code></p>",
                        data.check.findings.size() - rows.size());
  }
  return text;
}

std::string sizes(const ReportData& data) {
  std::string bar = "<div class=\"stack\">";
  std::vector<std::string> names;
  const auto add = [&](const std::string& type, uint64_t size_bytes, std::string_view kind) {
    bar += fmt::format(R"(<i style="flex:{} 0 0;background:{}" title="{}"></i>)", size_bytes,
                       palette_color(names.size()),
                       html_text(fmt::format("{}: {}, {}", type, format_bytes(size_bytes), kind)));
    names.push_back(type);
  };
  std::vector<std::vector<std::string>> rows;
  std::vector<std::pair<std::string, const TypeFacts*>> types;
  for (const auto* side : {&data.quantized, &data.kept}) {
    for (const auto& [type, facts] : *side) types.emplace_back(type, &facts);
  }
  std::stable_sort(types.begin(), types.end(), [](const auto& a, const auto& b) {
    return a.second->size_bytes > b.second->size_bytes;
  });
  uint64_t rest = 0;
  for (const auto& [type, facts] : types) {
    if (names.size() + 1 < kMaxCurves) {
      add(type, facts->size_bytes, facts->kind);
    } else {
      rest += facts->size_bytes;
    }
    rows.push_back({code(type), html_text(facts->kind), std::to_string(facts->tensors),
                    count_text(facts->elements), format_bytes(facts->size_bytes),
                    fmt::format("{:.3f}", facts->bits_per_weight()),
                    percent(static_cast<double>(facts->size_bytes),
                            static_cast<double>(data.all.size_bytes))});
  }
  if (rest > 0) add("the rest", rest, "several");
  bar += "</div>";
  return "<h2>Size</h2>" + figure("Bytes by type of tensor", bar + legend(names), true) + "<br>" +
         table({"type", "stored as", "tensors", "weights", "size", "bits per weight", "share"},
               rows);
}

// One curve for a type, over the layers, with the range of its tensors.
std::string depth_plot(const ReportData& data, std::string_view label,
                       const std::function<const std::map<int64_t, Spread>&(const TypeFacts&)>& of,
                       double threshold, std::string_view threshold_text) {
  std::vector<std::string> names;
  Plot::Range x = {0, 0};
  Plot::Range y = {std::numeric_limits<double>::infinity(),
                   -std::numeric_limits<double>::infinity()};
  for (const auto& [type, facts] : data.quantized) {
    if (of(facts).empty()) continue;
    if (names.size() < kMaxCurves) names.push_back(type);
    for (const auto& [layer, spread] : of(facts)) {
      x.high = std::max(x.high, static_cast<double>(layer));
      y.low = std::min(y.low, spread.least);
      y.high = std::max(y.high, spread.most);
    }
  }
  if (names.empty()) return "";
  const double margin = std::max(0.08 * (y.high - y.low), 0.02 * std::abs(y.high) + 1e-6);
  y = {y.low - margin, y.high + margin};
  const double num_layers = x.high + 1;
  Plot plot({-0.5, x.high + 0.5}, y, "layer", label, Plot::Size::kWide);
  plot.y_axis(nice_ticks(y.low, y.high, 5));
  std::vector<double> layers;
  const auto step = static_cast<int64_t>(std::ceil(num_layers / 16));
  for (int64_t layer = 0; layer < static_cast<int64_t>(num_layers); layer += step) {
    layers.push_back(static_cast<double>(layer));
  }
  plot.x_axis(layers);
  if (!threshold_text.empty()) plot.threshold(threshold, threshold_text);
  for (size_t i = 0; i < names.size(); ++i) {
    const std::map<int64_t, Spread>& spreads = of(data.quantized.at(names[i]));
    // Types side by side, so that their ranges do not hide each other.
    const double shift = (static_cast<double>(i) + 0.5) / static_cast<double>(names.size()) - 0.5;
    std::vector<std::pair<double, double>> curve;
    for (const auto& [layer, spread] : spreads) {
      const double at = static_cast<double>(layer) + 0.6 * shift;
      const std::string title =
          fmt::format("{}, layer {}: {:.2f} ({:.2f} to {:.2f}, {} tensors)", names[i], layer,
                      spread.mean(), spread.least, spread.most, spread.count);
      if (spread.count > 1) plot.span(at, spread.least, spread.most, palette_color(i), title);
      curve.emplace_back(at, spread.mean());
    }
    plot.line(curve, palette_color(i));
    for (const auto& [layer, spread] : spreads) {
      plot.point(static_cast<double>(layer) + 0.6 * shift, spread.mean(), palette_color(i),
                 fmt::format("{}, layer {}: {:.2f}", names[i], layer, spread.mean()));
    }
  }
  return plot.svg(label) + legend(names);
}

std::string sqnr_histogram(const ReportData& data) {
  constexpr size_t kBins = 32;
  std::vector<double> values;
  for (const CheckedTensor* tensor : data.worst()) {
    if (std::isfinite(tensor->figures->sqnr_db)) values.push_back(tensor->figures->sqnr_db);
  }
  if (values.empty()) return "";
  const auto [least, most] = std::minmax_element(values.begin(), values.end());
  const double low = *least;
  const double width = std::max((*most - low) / kBins, 1e-3);
  std::array<int64_t, kBins> counts{};
  for (const double value : values) {
    ++counts[std::min(static_cast<size_t>((value - low) / width), kBins - 1)];
  }
  const auto highest = static_cast<double>(*std::max_element(counts.begin(), counts.end()));
  Plot plot({low, low + width * kBins}, {0, highest * 1.05}, "SQNR, dB", "tensors");
  plot.y_axis(nice_ticks(0, highest, 4));
  plot.x_axis(nice_ticks(low, low + width * kBins, 6));
  for (size_t i = 0; i < kBins; ++i) {
    const double at = low + (static_cast<double>(i) + 0.5) * width;
    plot.bar(
        at, width * 0.9, static_cast<double>(counts[i]), palette_color(0),
        fmt::format("{:.3f} to {:.3f} dB: {} tensors", at - width / 2, at + width / 2, counts[i]));
  }
  return plot.svg("Number of tensors by SQNR");
}

// Tensors by the share of their elements that became zero, and that were clipped.
std::string flush_histogram(const ReportData& data) {
  constexpr size_t kBins = 24;
  double highest_share = 0;
  for (const CheckedTensor* tensor : data.worst()) {
    highest_share = std::max({highest_share, tensor->figures->flushed_percent,
                              tensor->figures->clipped_percent.value_or(0)});
  }
  const double width = std::max(highest_share, 0.1) / kBins;
  std::array<std::array<int64_t, kBins>, 2> counts{};
  for (const CheckedTensor* tensor : data.worst()) {
    const std::array shares = {tensor->figures->flushed_percent,
                               tensor->figures->clipped_percent.value_or(0)};
    for (size_t i = 0; i < shares.size(); ++i) {
      ++counts[i][std::min(static_cast<size_t>(shares[i] / width), kBins - 1)];
    }
  }
  int64_t highest = 0;
  for (const auto& bins : counts) {
    highest = std::max(highest, *std::max_element(bins.begin(), bins.end()));
  }
  Plot plot({0, width * kBins}, {0, static_cast<double>(highest) * 1.05}, "% of elements",
            "tensors");
  plot.y_axis(nice_ticks(0, static_cast<double>(highest), 4));
  plot.x_axis(nice_ticks(0, width * kBins, 6));
  constexpr std::array<std::string_view, 2> kNames = {"flushed to zero", "clipped"};
  for (size_t i = 0; i < kBins; ++i) {
    for (size_t kind = 0; kind < counts.size(); ++kind) {
      if (counts[kind][i] == 0) continue;
      const double left = (static_cast<double>(i) + 0.25 + 0.5 * static_cast<double>(kind)) * width;
      plot.bar(left, width * 0.45, static_cast<double>(counts[kind][i]), palette_color(kind),
               fmt::format("{}: {:.2f} to {:.2f} %: {} tensors", kNames[kind],
                           static_cast<double>(i) * width, static_cast<double>(i + 1) * width,
                           counts[kind][i]));
    }
  }
  return plot.svg("Number of tensors by the share of flushed and clipped elements") +
         legend({std::string(kNames[0]), std::string(kNames[1])});
}

// Least, mean and most SQNR of each type, one below the other.
std::string type_plot(const ReportData& data) {
  double low = std::numeric_limits<double>::infinity();
  double high = -low;
  std::vector<std::pair<std::string, Spread>> types;
  for (const auto& [type, facts] : data.quantized) {
    if (facts.sqnr_db.count == 0) continue;
    types.emplace_back(type, facts.sqnr_db);
    low = std::min(low, facts.sqnr_db.least);
    high = std::max(high, facts.sqnr_db.most);
  }
  if (types.empty()) return "";
  const double span = std::max(high - low, 1e-3);
  std::vector<std::vector<std::string>> rows;
  for (const auto& [type, spread] : types) {
    const auto at = [&](double value) { return 6 + 288 * (value - low) / span; };
    rows.push_back(
        {code(type), std::to_string(spread.count), fmt::format("{:.2f}", spread.least),
         fmt::format("{:.2f}", spread.mean()), fmt::format("{:.2f}", spread.most),
         fmt::format(
             R"(<svg viewBox="0 0 300 18" style="width:300px;height:18px;display:inline-block">)"
             R"(<line class="grid" x1="6" x2="294" y1="9" y2="9"/>)"
             R"svg(<line class="span" x1="{:.1f}" x2="{:.1f}" y1="9" y2="9" style="stroke:var(--c0);stroke-width:8"/>)svg"
             R"svg(<circle cx="{:.1f}" cy="9" r="4" style="fill:var(--c0)"/></svg>)svg",
             at(spread.least), at(spread.most), at(spread.mean()))});
  }
  return table({"type", "tensors", "least dB", "mean dB", "most dB",
                fmt::format("{:.2f} to {:.2f} dB", low, high)},
               rows);
}

std::string worst_table(const ReportData& data) {
  std::vector<std::vector<std::string>> rows;
  for (const CheckedTensor* tensor : data.worst()) {
    if (rows.size() == kWorstTensors) break;
    const ErrorFigures& figures = *tensor->figures;
    rows.push_back({code(tensor->tensor.name), html_text(format_shape(tensor->tensor.shape)),
                    format_fixed(figures.sqnr_db, 2), fmt::format("{:.5f}", figures.cosine),
                    fmt::format("{:.5f}", figures.norm_ratio),
                    fmt::format("{:.2e}", figures.max_abs),
                    figures.clipped_percent ? fmt::format("{:.2f}", *figures.clipped_percent) : "",
                    fmt::format("{:.2f}", figures.flushed_percent)});
  }
  return table(
      {"tensor", "shape", "SQNR dB", "cosine", "norm ratio", "max abs", "clipped %", "flushed %"},
      rows);
}

std::string errors(const ReportData& data) {
  if (!data.has_errors()) {
    return "<h2>Error</h2><p>Not measured: <code>--against SRC</code> compares with the plain "
           "checkpoint.</p>";
  }
  const auto of = [](const TypeFacts& facts) -> const std::map<int64_t, Spread>& {
    return facts.by_layer;
  };
  return "<h2>Error</h2><p>SQNR is -20 log10 of the relative error: 6 dB is a factor 2. Points are "
         "means, bars the range of the tensors of one type in a layer.</p>" +
         figure("SQNR over depth", depth_plot(data, "SQNR, dB", of, 0, ""), true) +
         "<br><div class=\"grid2\">" + figure("Distribution of SQNR", sqnr_histogram(data)) +
         figure("Flushed and clipped", flush_histogram(data)) + "</div><br>" +
         figure("SQNR by type", type_plot(data), true) + "<br>" +
         figure("Worst tensors", worst_table(data), true);
}

// The values of FP4 codes from -6 to 6, both zeros in one place.
std::string fp4_histogram(const std::array<int64_t, 16>& counts, int64_t total) {
  constexpr std::array<std::string_view, 8> kValues = {"0", "0.5", "1", "1.5", "2", "3", "4", "6"};
  std::vector<std::pair<std::string, int64_t>> bars;
  for (size_t code = 15; code > 8; --code) {
    bars.emplace_back("-" + std::string(kValues[code - 8]), counts[code]);
  }
  bars.emplace_back("0", counts[0] + counts[8]);
  for (size_t code = 1; code < 8; ++code) bars.emplace_back(kValues[code], counts[code]);
  double highest = 0;
  for (const auto& [unused_text, count] : bars) {
    highest = std::max(highest, percent_of(static_cast<double>(count), static_cast<double>(total)));
  }
  Plot plot({-0.5, 14.5}, {0, highest * 1.05}, "value of the code", "% of codes");
  plot.y_axis(nice_ticks(0, highest, 4));
  std::vector<std::pair<double, std::string>> texts;
  texts.reserve(bars.size());
  for (size_t i = 0; i < bars.size(); ++i) {
    const double share =
        percent_of(static_cast<double>(bars[i].second), static_cast<double>(total));
    texts.emplace_back(static_cast<double>(i), bars[i].first);
    plot.bar(static_cast<double>(i), 0.8, share, palette_color(i == 7 ? 9 : 2),
             fmt::format("{}: {:.2f} %", bars[i].first, share));
  }
  plot.x_axis_texts(texts);
  return plot.svg("Share of codes by value");
}

std::string fp8_histogram(const std::array<int64_t, 16>& counts, int64_t total) {
  double highest = 0;
  for (const int64_t count : counts) {
    highest = std::max(highest, percent_of(static_cast<double>(count), static_cast<double>(total)));
  }
  Plot plot({-0.5, 15.5}, {0, highest * 1.05}, "exponent of the code (d: denormals and zero)",
            "% of codes");
  plot.y_axis(nice_ticks(0, highest, 4));
  std::vector<std::pair<double, std::string>> texts;
  texts.reserve(counts.size());
  for (size_t i = 0; i < counts.size(); ++i) {
    const double share = percent_of(static_cast<double>(counts[i]), static_cast<double>(total));
    const std::string text = i == 0 ? "d" : std::to_string(static_cast<int>(i) - 7);
    texts.emplace_back(static_cast<double>(i), text);
    plot.bar(static_cast<double>(i), 0.8, share, palette_color(2),
             fmt::format("2^{}: {:.2f} %", text, share));
  }
  plot.x_axis_texts(texts);
  return plot.svg("Share of codes by exponent");
}

// Codes and scales of all tensors of one convention.
struct KindRange {
  CodeStatistics sums;
  std::array<int64_t, 16> codes{};
  int element_bits = 4;
};

std::map<std::string, KindRange> ranges_by_kind(const ReportData& data) {
  std::map<std::string, KindRange> kinds;
  for (const CheckedTensor& checked : data.check.tensors) {
    if (!checked.statistics) continue;
    KindRange& kind = kinds[kind_of_tensor(checked.tensor)];
    kind.element_bits =
        format_info(convention_info(*checked.tensor.convention).format).element_bits;
    const CodeStatistics& statistics = *checked.statistics;
    for (size_t i = 0; i < statistics.code_counts.size(); ++i) {
      kind.codes[i] += statistics.code_counts[i];
    }
    kind.sums.codes += statistics.codes;
    kind.sums.codes_at_maximum += statistics.codes_at_maximum;
    kind.sums.blocks += statistics.blocks;
    kind.sums.zero_blocks += statistics.zero_blocks;
    kind.sums.low_blocks += statistics.low_blocks;
    kind.sums.zero_scales += statistics.zero_scales;
    kind.sums.denormal_scales += statistics.denormal_scales;
    kind.sums.saturated_scales += statistics.saturated_scales;
    kind.sums.nonfinite_scales += statistics.nonfinite_scales;
    for (const auto& [exponent, count] : statistics.scale_exponents) {
      kind.sums.scale_exponents[exponent] += count;
    }
  }
  return kinds;
}

std::string scale_histogram(const CodeStatistics& sums) {
  if (sums.scale_exponents.empty()) return "";
  const int low = sums.scale_exponents.begin()->first;
  const int high = sums.scale_exponents.rbegin()->first;
  const auto share = [&](int64_t count) {
    return percent_of(static_cast<double>(count), static_cast<double>(sums.blocks));
  };
  double highest = 0;
  for (const auto& [unused_exponent, count] : sums.scale_exponents) {
    highest = std::max(highest, share(count));
  }
  Plot plot({low - 0.5, high + 0.5}, {0, highest * 1.05}, "log2 of the block scale, as stored",
            "% of blocks");
  plot.y_axis(nice_ticks(0, highest, 4));
  std::vector<double> ticks;
  for (const double tick : nice_ticks(low, high, 12)) {
    if (tick == std::floor(tick)) ticks.push_back(tick);
  }
  plot.x_axis(ticks);
  for (const auto& [exponent, count] : sums.scale_exponents) {
    plot.bar(exponent, 0.8, share(count), palette_color(5),
             fmt::format("2^{} to 2^{}: {:.3f} %", exponent, exponent + 1, share(count)));
  }
  return plot.svg("Share of blocks by the exponent of their scale");
}

std::string ranges(const ReportData& data) {
  const std::map<std::string, KindRange> kinds = ranges_by_kind(data);
  if (kinds.empty()) return "";
  std::vector<std::vector<std::string>> rows;
  std::string plots;
  for (const auto& [kind, range] : kinds) {
    const CodeStatistics& sums = range.sums;
    rows.push_back({html_text(kind), percent(sums.codes_at_maximum, sums.codes),
                    percent(sums.zero_blocks, sums.blocks), percent(sums.low_blocks, sums.blocks),
                    percent(sums.saturated_scales, sums.blocks),
                    percent(sums.denormal_scales, sums.blocks),
                    percent(sums.zero_scales, sums.blocks), std::to_string(sums.nonfinite_scales)});
    if (sums.codes > 0) {
      plots += figure(kind + ": codes", range.element_bits == 4
                                            ? fp4_histogram(range.codes, sums.codes)
                                            : fp8_histogram(range.codes, sums.codes));
    }
    plots += figure(kind + ": block scales", scale_histogram(sums));
  }
  const auto of = [](const TypeFacts& facts) -> const std::map<int64_t, Spread>& {
    return facts.scales_by_layer;
  };
  const std::string globals = depth_plot(data, "log2 of the global scale", of, 0, "");
  if (!globals.empty()) plots += figure("Global scales over depth", globals, true);
  return "<h2>Range of codes and scales</h2><div class=\"grid2\">" + plots + "</div><br>" +
         table({"", "codes at the largest value", "zero blocks", "blocks below a third of it",
                "largest scale", "denormal scale", "zero scale", "NaN scales"},
               rows);
}

std::string kept(const ReportData& data) {
  if (data.kept.empty()) return "";
  std::vector<std::vector<std::string>> rows;
  for (const auto& [type, facts] : data.kept) {
    rows.push_back({code(type), html_text(facts.kind), std::to_string(facts.tensors),
                    format_bytes(facts.size_bytes)});
  }
  return "<h2>Kept as it was</h2>" + table({"type", "dtype", "tensors", "size"}, rows);
}

std::string origin(const ReportData& data) {
  std::vector<std::vector<std::string>> rows;
  const auto add = [&](std::string_view what, std::string_view value) {
    rows.push_back({html_text(what), "<code>" + html_text(value) + "</code>"});
  };
  for (const auto& [key, value] : data.check.metadata) add(key, value);
  if (data.check.metadata.empty()) add("written by", "other software: the files record nothing");
  if (!data.check.fingerprint.empty())
    add("hash of this checkpoint's headers", data.check.fingerprint);
  if (!data.check.source_fingerprint.empty()) {
    add("hash of the source's headers", data.check.source_fingerprint);
  }
  add("report by", fmt::format("narrowfloat {}", version()));
  std::vector<std::vector<std::string>> files;
  for (const StoredFile& file : data.files) {
    files.push_back({code(file.name), std::to_string(file.tensors), format_bytes(file.size_bytes)});
  }
  std::string text = "<h2>How it was made</h2>" + table({"", ""}, rows, 1);
  if (!data.declared.empty()) {
    text += "<h3><br>quantization_config</h3><pre>" + html_text(data.declared) + "</pre>";
  }
  return text + "<br>" + table({"file", "tensors", "size"}, files);
}

}  // namespace

std::string html_report(const ReportData& data) {
  return fmt::format(
      "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n"
      "<meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">\n"
      "<title>{} - narrowfloat report</title>\n<style>{}</style></head>\n<body><main>\n"
      "{}{}{}{}{}{}{}{}<footer>narrowfloat {}. Figures: docs/howto/read_the_error_report.md; "
      "findings: docs/checkpoints.md.</footer>\n</main></body></html>\n",
      html_text(data.title), kStyle, header(data), cards(data), findings(data), sizes(data),
      errors(data), ranges(data), kept(data), origin(data), version());
}

}  // namespace narrowfloat::cli
