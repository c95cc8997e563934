// Frames over UCX (https://openucx.org), which drives InfiniBand, RoCE and other fast networks. Its library is opened
// at the first use and nothing links against it. Built without UCX's headers, open_ucx() says so and nothing else
// works.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "net/frame_channel.h"

namespace dtcomm {

struct UcxDescription {
  std::string version;
  std::vector<std::string> devices;  // transports and devices that UCX may use, such as "rc_mlx5/mlx5_0:1"
};

// Opens the first of these libraries (libucp.so.0 of UCX) that can be opened, unless one was opened before. Throws
// std::runtime_error with the reason if that or UCX itself fails.
UcxDescription open_ucx(const std::vector<std::string>& libraries);

// The endpoint of one rank of a communicator. Not thread-safe. Destroying it ends all channels and cancels what they
// send and receive.
class UcxWorker {
 public:
  virtual ~UcxWorker() = default;
  // What peers connect with. It holds `token`, which they send with every message.
  virtual std::string address() const = 0;
  // Connects to a peer. Its frames go to `sink`, which must outlive this object. `own_number` is the number under which
  // the peer connects to this worker. Throws std::runtime_error if no transport reaches the peer. Frames of text arrive
  // in the order in which they were sent, and payloads too where they are small; large payloads may arrive later than
  // what was sent after them.
  virtual FrameChannel& connect(std::uint32_t number, std::uint32_t own_number, const std::string& address,
                                FrameSink& sink) = 0;
  // Sends and receives what can be sent and received now.
  virtual void progress() = 0;
  // A descriptor that is readable while there is something to progress, if arm() has returned true since the last call
  // of progress(); arm() returns false if there is something already.
  virtual int event_fd() const = 0;
  virtual bool arm() = 0;
  // Makes progress; true when the network has everything that was sent before the first call.
  virtual bool is_flushed() = 0;
};

// Throws std::runtime_error as open_ucx(), which must have been called before, does.
std::unique_ptr<UcxWorker> make_ucx_worker(std::uint64_t token);

}  // namespace dtcomm
