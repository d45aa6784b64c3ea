// See svg_plot.h.
#include "cli/svg_plot.h"

#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include "cli_common/output.h"

namespace narrowfloat::cli {
namespace {

constexpr double kLeft = 54;
constexpr double kRight = 12;
constexpr double kTop = 14;
constexpr double kBottom = 44;
constexpr size_t kColors = 10;

}  // namespace

std::string html_text(std::string_view text) {
  std::string result;
  for (const char c : escaped(text)) {
    switch (c) {
      case '&':
        result += "&amp;";
        break;
      case '<':
        result += "&lt;";
        break;
      case '>':
        result += "&gt;";
        break;
      case '"':
        result += "&quot;";
        break;
      default:
        result += c;
    }
  }
  return result;
}

std::vector<double> nice_ticks(double low, double high, int count) {
  const double span = std::max(high - low, 1e-12);
  const double rough = span / count;
  const double power = std::pow(10.0, std::floor(std::log10(rough)));
  double step = power;
  for (const double factor : {1.0, 2.0, 5.0, 10.0}) {
    step = factor * power;
    if (step >= rough) break;
  }
  std::vector<double> ticks;
  for (double tick = std::ceil(low / step) * step; tick <= high + step * 1e-9; tick += step) {
    ticks.push_back(std::abs(tick) < step * 1e-9 ? 0 : tick);
  }
  return ticks;
}

std::string tick_text(double value) { return fmt::format("{:.6g}", value); }

Plot::Plot(Range x, Range y, std::string_view x_label, std::string_view y_label, Size size)
    : x_(x),
      y_(y),
      width_(size == Size::kWide ? 1100 : 530),
      height_(size == Size::kWide ? 320 : 250),
      x_label_(x_label),
      y_label_(y_label) {
  // A single value still needs an extent.
  if (!(x_.high > x_.low)) x_ = {x_.low - 0.5, x_.low + 0.5};
  if (!(y_.high > y_.low)) y_ = {y_.low - 0.5, y_.low + 0.5};
}

double Plot::x_at(double x) const {
  return kLeft + (x - x_.low) / (x_.high - x_.low) * (width_ - kLeft - kRight);
}

double Plot::y_at(double y) const {
  return height_ - kBottom - (y - y_.low) / (y_.high - y_.low) * (height_ - kTop - kBottom);
}

void Plot::y_axis(const std::vector<double>& ticks) {
  for (const double tick : ticks) {
    marks_ +=
        fmt::format(R"(<line class="grid" x1="{0:.1f}" x2="{1:.1f}" y1="{2:.1f}" y2="{2:.1f}"/>)"
                    R"(<text class="tick" x="{3:.1f}" y="{4:.1f}" text-anchor="end">{5}</text>)",
                    kLeft, width_ - kRight, y_at(tick), kLeft - 6, y_at(tick) + 4, tick_text(tick));
  }
}

void Plot::x_axis(const std::vector<double>& ticks) {
  std::vector<std::pair<double, std::string>> texts;
  texts.reserve(ticks.size());
  for (const double tick : ticks) texts.emplace_back(tick, tick_text(tick));
  x_axis_texts(texts);
}

void Plot::x_axis_texts(const std::vector<std::pair<double, std::string>>& texts) {
  for (const auto& [x, text] : texts) {
    marks_ +=
        fmt::format(R"(<text class="tick" x="{:.1f}" y="{:.1f}" text-anchor="middle">{}</text>)",
                    x_at(x), height_ - kBottom + 16, html_text(text));
  }
}

void Plot::bar(double x, double width, double height, std::string_view color,
               std::string_view title) {
  const double top = y_at(height);
  marks_ += fmt::format(
      R"(<rect x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}" rx="1.5" style="fill:{}">)"
      R"(<title>{}</title></rect>)",
      x_at(x - width / 2), top, x_at(x + width / 2) - x_at(x - width / 2),
      std::max(0.0, y_at(y_.low) - top), color, html_text(title));
}

void Plot::line(const std::vector<std::pair<double, double>>& points, std::string_view color) {
  std::string path;
  for (const auto& [x, y] : points) path += fmt::format("{:.1f},{:.1f} ", x_at(x), y_at(y));
  marks_ += fmt::format(R"(<polyline class="curve" points="{}" style="stroke:{}"/>)", path, color);
}

void Plot::span(double x, double low, double high, std::string_view color, std::string_view title) {
  marks_ += fmt::format(
      R"(<line class="span" x1="{0:.1f}" x2="{0:.1f}" y1="{1:.1f}" y2="{2:.1f}" style="stroke:{3}">)"
      R"(<title>{4}</title></line>)",
      x_at(x), y_at(low), y_at(high), color, html_text(title));
}

void Plot::point(double x, double y, std::string_view color, std::string_view title) {
  marks_ += fmt::format(
      R"(<circle cx="{:.1f}" cy="{:.1f}" r="3.2" style="fill:{}"><title>{}</title></circle>)",
      x_at(x), y_at(y), color, html_text(title));
}

void Plot::threshold(double y, std::string_view text) {
  if (y < y_.low || y > y_.high) return;
  marks_ +=
      fmt::format(R"(<line class="threshold" x1="{0:.1f}" x2="{1:.1f}" y1="{2:.1f}" y2="{2:.1f}"/>)"
                  R"(<text class="tick" x="{1:.1f}" y="{3:.1f}" text-anchor="end">{4}</text>)",
                  kLeft, width_ - kRight, y_at(y), y_at(y) - 5, html_text(text));
}

std::string Plot::svg(std::string_view description) const {
  return fmt::format(R"(<svg viewBox="0 0 {0} {1}" role="img" aria-label="{2}">{3})"
                     R"(<line class="axis" x1="{4}" x2="{5}" y1="{6}" y2="{6}"/>)"
                     R"(<text class="label" x="{7}" y="{8}" text-anchor="middle">{9}</text>)"
                     R"svg(<text class="label" transform="translate(13,{10}) rotate(-90)" )svg"
                     R"(text-anchor="middle">{11}</text></svg>)",
                     width_, height_, html_text(description), marks_, kLeft, width_ - kRight,
                     height_ - kBottom, (kLeft + width_ - kRight) / 2, height_ - 6,
                     html_text(x_label_), (kTop + height_ - kBottom) / 2, html_text(y_label_));
}

std::string palette_color(size_t index) { return fmt::format("var(--c{})", index % kColors); }

std::string legend(const std::vector<std::string>& names) {
  std::string text = "<div class=\"legend\">";
  for (size_t i = 0; i < names.size(); ++i) {
    text += fmt::format(R"(<span><i style="background:{}"></i>{}</span>)", palette_color(i),
                        html_text(names[i]));
  }
  return text + "</div>";
}

}  // namespace narrowfloat::cli
