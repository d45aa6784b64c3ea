// Plots as inline SVG. Colours are CSS classes and variables of the page, so that they follow its
// light or dark scheme; every mark has a title, which browsers show when the pointer is on it.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace narrowfloat::cli {

// Text for HTML and SVG; control characters and bytes that are not UTF-8 are escaped as in
// messages.
std::string html_text(std::string_view text);

// About `count` round numbers that cover [low, high].
std::vector<double> nice_ticks(double low, double high, int count);
// A number without digits that say nothing: "0.25", "17", "1e-05".
std::string tick_text(double value);

// A rectangle with a linear scale on both axes. Marks are drawn in the order of the calls.
class Plot {
 public:
  struct Range {
    double low = 0;
    double high = 1;
  };
  // A wide plot takes the width of the page, others half of it, so that texts have one size.
  enum class Size { kHalf, kWide };
  Plot(Range x, Range y, std::string_view x_label, std::string_view y_label,
       Size size = Size::kHalf);

  // Horizontal grid lines with numbers.
  void y_axis(const std::vector<double>& ticks);
  // Numbers below the x axis.
  void x_axis(const std::vector<double>& ticks);
  void x_axis_texts(const std::vector<std::pair<double, std::string>>& texts);

  void bar(double x, double width, double height, std::string_view color, std::string_view title);
  void line(const std::vector<std::pair<double, double>>& points, std::string_view color);
  void span(double x, double low, double high, std::string_view color, std::string_view title);
  void point(double x, double y, std::string_view color, std::string_view title);
  // A dashed line across at y.
  void threshold(double y, std::string_view text);

  [[nodiscard]] std::string svg(std::string_view description) const;

 private:
  [[nodiscard]] double x_at(double x) const;
  [[nodiscard]] double y_at(double y) const;

  Range x_;
  Range y_;
  double width_;
  double height_;
  std::string x_label_;
  std::string y_label_;
  std::string marks_;
};

// The n-th colour of the page's palette.
std::string palette_color(size_t index);

// Swatches with names.
std::string legend(const std::vector<std::string>& names);

}  // namespace narrowfloat::cli
