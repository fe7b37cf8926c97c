// The outcome of an operation, and what keeps exceptions inside the library.

#ifndef JAX_R2P_FFI_STATUS_H_
#define JAX_R2P_FFI_STATUS_H_

#include <exception>
#include <sstream>
#include <string>
#include <utility>

#include "c_api.h"

namespace jax_r2p {

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(R2pCode code, std::string message) : code_(code), message_(std::move(message)) {}

  bool ok() const { return code_ == R2P_OK; }
  R2pCode code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  R2pCode code_ = R2P_OK;
  std::string message_;
};

// The arguments one after the other, as a stream prints them.
template <typename... Parts>
std::string Text(const Parts&... parts) {
  std::ostringstream stream;
  (stream << ... << parts);
  return stream.str();
}

template <typename... Parts>
Status InvalidArgument(const Parts&... parts) {
  return Status(R2P_INVALID_ARGUMENT, Text(parts...));
}

// Runs `body`, which returns a Status. An exception (out of memory is the one that can happen) becomes an
// error, since neither ctypes nor XLA could catch it.
template <typename Body>
Status WithoutExceptions(Body&& body) {
  try {
    return body();
  } catch (const std::exception& exception) {
    return Status(R2P_INTERNAL, Text("unexpected exception: ", exception.what()));
  } catch (...) {
    return Status(R2P_INTERNAL, "unexpected exception of an unknown type");
  }
}

}  // namespace jax_r2p

#define R2P_RETURN_IF_ERROR(expression)                            \
  do {                                                             \
    if (::jax_r2p::Status status_ = (expression); !status_.ok()) { \
      return status_;                                              \
    }                                                              \
  } while (false)

#endif  // JAX_R2P_FFI_STATUS_H_
