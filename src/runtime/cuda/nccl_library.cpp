// See nccl_library.h.
#include "runtime/cuda/nccl_library.h"

#include <cstdlib>
#include <dlfcn.h>
#include <memory>
#include <mutex>
#include <optional>

#include "base/throw_error.h"

namespace narrowfloat {
namespace {

constexpr const char* kNcclFile = "libnccl.so.2";
constexpr const char* kNcclVariable = "NARROWFLOAT_NCCL";

struct CloseLibrary {
  void operator()(void* library) const { ::dlclose(library); }
};
using LoadedLibrary = std::unique_ptr<void, CloseLibrary>;

std::string loader_error() {
  const char* text = ::dlerror();
  return text == nullptr ? "unknown error" : text;
}

LoadedLibrary open_nccl() {
  if (const char* path = std::getenv(kNcclVariable); path != nullptr && *path != '\0') {
    LoadedLibrary library(::dlopen(path, RTLD_NOW | RTLD_LOCAL));
    if (library) return library;
    throw_error(ErrorKind::kUnsupported, "{}={}: cannot load NCCL: {}", kNcclVariable, path,
                loader_error());
  }
  LoadedLibrary library(::dlopen(kNcclFile, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD));
  if (!library) library.reset(::dlopen(kNcclFile, RTLD_NOW | RTLD_LOCAL));
  if (library) return library;
  throw_error(ErrorKind::kUnsupported,
              "NCCL is not found: {} (install NCCL, or set {} to the path of {})", loader_error(),
              kNcclVariable, kNcclFile);
}

template <typename Function>
void find_function(const LoadedLibrary& library, const char* name, Function*& function) {
  function = reinterpret_cast<Function*>(::dlsym(library.get(), name));
  if (function == nullptr) {
    throw_error(ErrorKind::kUnsupported, "NCCL has no function {}: expected 2.18 or newer", name);
  }
}

nccl::Functions functions_of(const LoadedLibrary& library) {
  nccl::Functions f{};
  find_function(library, "ncclGetVersion", f.GetVersion);
  find_function(library, "ncclGetUniqueId", f.GetUniqueId);
  find_function(library, "ncclCommInitRankConfig", f.CommInitRankConfig);
  find_function(library, "ncclCommFinalize", f.CommFinalize);
  find_function(library, "ncclCommDestroy", f.CommDestroy);
  find_function(library, "ncclCommAbort", f.CommAbort);
  find_function(library, "ncclCommGetAsyncError", f.CommGetAsyncError);
  find_function(library, "ncclGetErrorString", f.GetErrorString);
  find_function(library, "ncclGetLastError", f.GetLastError);
  find_function(library, "ncclGroupStart", f.GroupStart);
  find_function(library, "ncclGroupEnd", f.GroupEnd);
  find_function(library, "ncclAllReduce", f.AllReduce);
  find_function(library, "ncclAllGather", f.AllGather);
  find_function(library, "ncclSend", f.Send);
  find_function(library, "ncclRecv", f.Recv);
  return f;
}

// The file that a function was loaded from.
std::string path_of(nccl::Result (*function)(int*)) {
  Dl_info info{};
  if (::dladdr(reinterpret_cast<const void*>(function), &info) == 0) return {};
  return info.dli_fname == nullptr ? "" : info.dli_fname;
}

NcclLibrary describe(const LoadedLibrary& library) {
  NcclLibrary result{.functions = functions_of(library), .version = {}, .path = {}};
  result.path = path_of(result.functions.GetVersion);
  int version = 0;
  if (result.functions.GetVersion(&version) != nccl::kSuccess) {
    throw_error(ErrorKind::kUnsupported, "{}: NCCL does not tell its version", result.path);
  }
  result.version = fmt::format("{}.{}.{}", version / 10000, version / 100 % 100, version % 100);
  if (version < nccl::kOldestVersion) {
    throw_error(ErrorKind::kUnsupported, "{}: expected NCCL 2.18 or newer, got {}", result.path,
                result.version);
  }
  return result;
}

}  // namespace

const NcclLibrary& nccl_library() {
  static std::mutex mutex;
  static std::optional<NcclLibrary> loaded;
  const std::lock_guard lock(mutex);
  if (!loaded) {
    LoadedLibrary library = open_nccl();
    ::setenv("NCCL_NVLS_ENABLE", "0", /*overwrite=*/0);
    loaded = describe(library);
    static_cast<void>(library.release());  // NCCL has threads: it stays.
  }
  return *loaded;
}

NcclInfo find_nccl() {
  try {
    const NcclLibrary library = describe(open_nccl());
    return {.found = true, .version = library.version, .path = library.path, .reason = {}};
  } catch (const Error& error) {
    return {.found = false, .version = {}, .path = {}, .reason = error.what()};
  }
}

}  // namespace narrowfloat
