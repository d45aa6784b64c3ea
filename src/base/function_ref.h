// A reference to a callable, for callees that do not keep it. In contrast to std::function it never
// allocates, so operations that must not allocate can take closures of any size.
#pragma once

#include <concepts>
#include <type_traits>
#include <utility>

namespace narrowfloat {

template <typename Signature>
class FunctionRef;

template <typename Result, typename... Args>
class FunctionRef<Result(Args...)> {
 public:
  // The callable must outlive the reference: pass it as an argument, do not store it.
  template <typename Callable>
  requires(!std::same_as<std::remove_cvref_t<Callable>, FunctionRef> &&
           std::is_invocable_r_v<Result, const Callable&, Args...>)
      // NOLINTNEXTLINE(google-explicit-constructor): as std::function.
      FunctionRef(const Callable& callable)
      : object_(&callable), call_([](const void* object, Args... args) -> Result {
          return (*static_cast<const Callable*>(object))(std::forward<Args>(args)...);
        }) {}

  Result operator()(Args... args) const { return call_(object_, std::forward<Args>(args)...); }

 private:
  const void* object_;
  Result (*call_)(const void* object, Args... args);
};

}  // namespace narrowfloat
