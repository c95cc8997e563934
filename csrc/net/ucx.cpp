#include "net/ucx.h"

#include <stdexcept>

#ifdef DTCOMM_UCX_HEADERS

#include <dlfcn.h>
#include <ucp/api/ucp.h>
#include <ucs/async/async_fwd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <mutex>
#include <utility>

#include "net/listening_sockets.h"
#include "net/ucx_devices.h"

namespace dtcomm {
namespace {

constexpr unsigned kMessageId = 0;
// Frames of text travel in the header of a message, together with the header of a payload that follows them.
constexpr std::size_t kMaxBatch = 1024;
constexpr unsigned kMaxProgress = 256;  // events before other work is done
constexpr auto kCloseTime = std::chrono::milliseconds(200);

// The first bytes of every message.
struct MessageHeader {
  std::uint64_t token;
  std::uint32_t sender;
  std::uint32_t reserved;
};

// The functions of UCX that are used, by their own names.
struct Library {
  decltype(&::ucp_get_version) ucp_get_version;
  decltype(&::ucp_get_version_string) ucp_get_version_string;
  decltype(&::ucp_config_read) ucp_config_read;
  decltype(&::ucp_config_release) ucp_config_release;
  decltype(&::ucp_init_version) ucp_init_version;
  decltype(&::ucp_context_print_info) ucp_context_print_info;
  decltype(&::ucp_worker_create) ucp_worker_create;
  decltype(&::ucp_worker_destroy) ucp_worker_destroy;
  decltype(&::ucp_worker_query) ucp_worker_query;
  decltype(&::ucp_worker_release_address) ucp_worker_release_address;
  decltype(&::ucp_worker_progress) ucp_worker_progress;
  decltype(&::ucp_worker_get_efd) ucp_worker_get_efd;
  decltype(&::ucp_worker_arm) ucp_worker_arm;
  decltype(&::ucp_worker_flush_nbx) ucp_worker_flush_nbx;
  decltype(&::ucp_worker_set_am_recv_handler) ucp_worker_set_am_recv_handler;
  decltype(&::ucp_ep_create) ucp_ep_create;
  decltype(&::ucp_ep_close_nbx) ucp_ep_close_nbx;
  decltype(&::ucp_ep_print_info) ucp_ep_print_info;
  decltype(&::ucp_am_send_nbx) ucp_am_send_nbx;
  decltype(&::ucp_am_recv_data_nbx) ucp_am_recv_data_nbx;
  decltype(&::ucp_request_check_status) ucp_request_check_status;
  decltype(&::ucp_request_free) ucp_request_free;
  decltype(&::ucs_status_string) ucs_status_string;
  decltype(&::ucs_async_modify_handler) ucs_async_modify_handler;
  decltype(&::ucs_async_remove_handler) ucs_async_remove_handler;
};

class Worker;

// The library and its context, which live as long as the process: UCX keeps threads and memory of its own.
struct Process {
  std::mutex mutex;
  Library library;
  ucp_context_h context = nullptr;
  UcxDescription description;
  std::vector<Worker*> workers;
};

Process& process() {
  static auto* const instance = new Process;
  return *instance;
}

const Library& ucx() { return process().library; }

template <class Function>
void load(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (!function) throw std::runtime_error(std::string("UCX has no function ") + name);
}

Library load_functions(void* library) {
  Library functions{};
#define DTCOMM_LOAD(name) load(library, #name, functions.name)
  DTCOMM_LOAD(ucp_get_version);
  DTCOMM_LOAD(ucp_get_version_string);
  DTCOMM_LOAD(ucp_config_read);
  DTCOMM_LOAD(ucp_config_release);
  DTCOMM_LOAD(ucp_init_version);
  DTCOMM_LOAD(ucp_context_print_info);
  DTCOMM_LOAD(ucp_worker_create);
  DTCOMM_LOAD(ucp_worker_destroy);
  DTCOMM_LOAD(ucp_worker_query);
  DTCOMM_LOAD(ucp_worker_release_address);
  DTCOMM_LOAD(ucp_worker_progress);
  DTCOMM_LOAD(ucp_worker_get_efd);
  DTCOMM_LOAD(ucp_worker_arm);
  DTCOMM_LOAD(ucp_worker_flush_nbx);
  DTCOMM_LOAD(ucp_worker_set_am_recv_handler);
  DTCOMM_LOAD(ucp_ep_create);
  DTCOMM_LOAD(ucp_ep_close_nbx);
  DTCOMM_LOAD(ucp_ep_print_info);
  DTCOMM_LOAD(ucp_am_send_nbx);
  DTCOMM_LOAD(ucp_am_recv_data_nbx);
  DTCOMM_LOAD(ucp_request_check_status);
  DTCOMM_LOAD(ucp_request_free);
  DTCOMM_LOAD(ucs_status_string);  // of libucs, which libucp is linked against, as the following
  DTCOMM_LOAD(ucs_async_modify_handler);
  DTCOMM_LOAD(ucs_async_remove_handler);
#undef DTCOMM_LOAD
  return functions;
}

void require_ok(ucs_status_t status, const char* function) {
  if (status != UCS_OK) throw std::runtime_error(std::string(function) + ": " + ucx().ucs_status_string(status));
}

std::string failure(ucs_status_t status) { return std::string("UCX: ") + ucx().ucs_status_string(status); }

void open_library(const std::vector<std::string>& libraries) {
  std::string reason = "no library was named";
  void* library = nullptr;
  for (auto name = libraries.begin(); !library && name != libraries.end(); ++name) {
    library = dlopen(name->c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!library && name == libraries.begin()) reason = dlerror();
  }
  if (!library) throw std::runtime_error("UCX is not installed: " + reason);
  process().library = load_functions(library);
  unsigned major = 0, minor = 0, release = 0;
  ucx().ucp_get_version(&major, &minor, &release);
  if (major != 1 || minor < 12) {
    throw std::runtime_error(std::string("UCX ") + ucx().ucp_get_version_string() + " is not 1.12 or later");
  }
}

void open_context() {
  ucp_config_t* config = nullptr;
  require_ok(ucx().ucp_config_read(nullptr, nullptr, &config), "ucp_config_read");
  ucp_params_t parameters{};
  parameters.field_mask = UCP_PARAM_FIELD_FEATURES;
  parameters.features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP;
  const ucs_status_t status =
      ucx().ucp_init_version(UCP_API_MAJOR, UCP_API_MINOR, &parameters, config, &process().context);
  ucx().ucp_config_release(config);
  require_ok(status, "ucp_init");
  process().description = {
      ucx().ucp_get_version_string(),
      resources(printed([](FILE* file) { ucx().ucp_context_print_info(process().context, file); }), "resource ")};
}

// Takes an element out of a list, whose order does not matter.
template <class Element>
std::unique_ptr<Element> take(std::vector<std::unique_ptr<Element>>& list, const void* element) {
  const auto found = std::find_if(list.begin(), list.end(),
                                  [&](const std::unique_ptr<Element>& other) { return other.get() == element; });
  std::swap(*found, list.back());
  std::unique_ptr<Element> taken = std::move(list.back());
  list.pop_back();
  return taken;
}

class Channel final : public FrameChannel {
 public:
  Channel(Worker& worker, std::uint32_t own_number, const std::string& address, FrameSink& sink);
  Channel(const Channel&) = delete;

  void enqueue(const FrameHeader& frame, const std::uint8_t* data) override;
  void enqueue(FrameHeader frame, std::string text) override;
  bool flush() override;
  bool is_sending(const std::uint8_t* begin, const std::uint8_t* end) const override;
  bool keeps_order() const override { return false; }
  bool ended() const override { return end_.reached(); }
  const std::string& end_reason() const override { return end_.reason(); }
  std::vector<std::string> lanes() const override;

  // Takes a message apart. `frames` is its header behind the MessageHeader.
  void receive(const std::uint8_t* frames, std::size_t frame_bytes, void* data, std::size_t bytes,
               const ucp_am_recv_param_t& parameters);
  // Closes the endpoint; the request must be awaited, null if it is closed already.
  ucs_status_ptr_t close();
  void end(std::string reason);

 private:
  // A message that UCX has not sent to its end: it reads header and data until then.
  struct Message {
    Channel* channel = nullptr;
    std::vector<std::uint8_t> header;
    const std::uint8_t* data = nullptr;
    std::size_t bytes = 0;
  };
  // A payload that UCX is receiving.
  struct Arrival {
    Channel* channel = nullptr;
    FrameHeader frame;
    std::uint8_t* payload = nullptr;
  };
  void append(const FrameHeader& frame, const std::string& text);
  void send(const std::uint8_t* data, std::size_t bytes);
  void receive_payload(const FrameHeader& frame, void* data, bool is_descriptor);
  static void on_sent(void* request, ucs_status_t status, void* message);
  static void on_received(void* request, ucs_status_t status, std::size_t length, void* arrival);
  static void on_error(void* channel, ucp_ep_h, ucs_status_t status);

  Worker& worker_;
  FrameSink& sink_;
  ConnectionEnd end_;
  MessageHeader prefix_;
  ucp_ep_h endpoint_ = nullptr;
  std::vector<std::uint8_t> batch_;  // the next message's header
  std::vector<std::unique_ptr<Message>> sending_, unused_;
  std::vector<std::unique_ptr<Arrival>> arriving_;
  std::uint8_t text_[FrameSink::kMaxText];
};

class Worker final : public UcxWorker {
 public:
  explicit Worker(std::uint64_t token);
  ~Worker() override;

  std::string address() const override;
  FrameChannel& connect(std::uint32_t number, std::uint32_t own_number, const std::string& address,
                        FrameSink& sink) override;
  void progress() override;
  int event_fd() const override { return event_fd_; }
  bool arm() override { return ucx().ucp_worker_arm(worker_) == UCS_OK; }
  bool is_flushed() override;

  ucp_worker_h handle() const { return worker_; }

 private:
  void create();
  void destroy();
  void forget_closed_sockets();
  static ucs_status_t on_message(void* worker, const void* header, std::size_t header_bytes, void* data,
                                 std::size_t bytes, const ucp_am_recv_param_t* parameters);

  std::uint64_t token_;
  ucp_worker_h worker_ = nullptr;
  int event_fd_ = -1;
  std::vector<ListeningSocket> listening_;
  std::vector<std::unique_ptr<Channel>> channels_;  // by the peer's number
  bool flush_started_ = false;
  ucs_status_ptr_t flush_ = nullptr;
};

Channel::Channel(Worker& worker, std::uint32_t own_number, const std::string& address, FrameSink& sink)
    : worker_(worker), sink_(sink), prefix_{0, own_number, 0} {
  if (address.size() <= sizeof prefix_.token) throw std::runtime_error("UCX: a peer has no address");
  std::memcpy(&prefix_.token, address.data(), sizeof prefix_.token);
  ucp_ep_params_t parameters{};
  parameters.field_mask =
      UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER;
  parameters.address = reinterpret_cast<const ucp_address_t*>(address.data() + sizeof prefix_.token);
  const std::vector<std::string>& devices = process().description.devices;
  parameters.err_mode =
      std::all_of(devices.begin(), devices.end(), is_memory) ? UCP_ERR_HANDLING_MODE_NONE : UCP_ERR_HANDLING_MODE_PEER;
  parameters.err_handler = {&Channel::on_error, this};
  require_ok(ucx().ucp_ep_create(worker.handle(), &parameters, &endpoint_), "ucp_ep_create");
}

void Channel::append(const FrameHeader& frame, const std::string& text) {
  // Leaves space behind this frame for the header of a payload.
  if (batch_.size() + sizeof frame + text.size() + sizeof frame > kMaxBatch) flush();
  const auto* const bytes = reinterpret_cast<const std::uint8_t*>(&frame);
  if (batch_.empty()) {
    const auto* const prefix = reinterpret_cast<const std::uint8_t*>(&prefix_);
    batch_.assign(prefix, prefix + sizeof prefix_);
  }
  batch_.insert(batch_.end(), bytes, bytes + sizeof frame);
  batch_.insert(batch_.end(), text.begin(), text.end());
}

void Channel::enqueue(const FrameHeader& frame, const std::uint8_t* data) {
  if (ended()) return;
  append(frame, "");
  if (frame.bytes > 0) send(data, frame.bytes);
}

void Channel::enqueue(FrameHeader frame, std::string text) {
  if (ended()) return;
  frame.bytes = static_cast<std::uint32_t>(text.size());
  append(frame, text);
}

bool Channel::flush() {
  if (!ended() && !batch_.empty()) send(nullptr, 0);
  return !ended() && !sending_.empty();
}

void Channel::send(const std::uint8_t* data, std::size_t bytes) {
  if (unused_.empty()) unused_.push_back(std::make_unique<Message>());
  sending_.push_back(std::move(unused_.back()));
  unused_.pop_back();
  Message* const message = sending_.back().get();
  message->channel = this;
  message->header.swap(batch_);
  message->data = data;
  message->bytes = bytes;
  batch_.clear();
  ucp_request_param_t parameters{};
  parameters.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
  parameters.cb.send = &Channel::on_sent;
  parameters.user_data = message;
  const ucs_status_ptr_t request = ucx().ucp_am_send_nbx(endpoint_, kMessageId, message->header.data(),
                                                         message->header.size(), data, bytes, &parameters);
  if (UCS_PTR_IS_ERR(request)) end(failure(UCS_PTR_STATUS(request)));
  if (!UCS_PTR_IS_PTR(request)) unused_.push_back(take(sending_, message));
}

void Channel::on_sent(void* request, ucs_status_t status, void* message) {
  Channel& channel = *static_cast<Message*>(message)->channel;
  channel.unused_.push_back(take(channel.sending_, message));
  if (status != UCS_OK) channel.end(failure(status));
  ucx().ucp_request_free(request);
}

bool Channel::is_sending(const std::uint8_t* begin, const std::uint8_t* end) const {
  return !ended() && std::any_of(sending_.begin(), sending_.end(), [&](const std::unique_ptr<Message>& message) {
    return message->bytes > 0 && message->data < end && begin < message->data + message->bytes;
  });
}

std::vector<std::string> Channel::lanes() const {
  return resources(printed([&](FILE* file) { ucx().ucp_ep_print_info(endpoint_, file); }), "lane[");
}

void Channel::receive(const std::uint8_t* frames, std::size_t frame_bytes, void* data, std::size_t bytes,
                      const ucp_am_recv_param_t& parameters) {
  if (ended()) return;
  bool payload_expected = bytes > 0;
  while (frame_bytes > 0) {
    FrameHeader frame;
    if (frame_bytes < sizeof frame) break;
    std::memcpy(&frame, frames, sizeof frame);
    frames += sizeof frame;
    frame_bytes -= sizeof frame;
    if (frame_bytes == 0 && payload_expected) {
      if (frame.bytes != bytes) break;
      return receive_payload(frame, data, (parameters.recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0);
    }
    if (frame.bytes > frame_bytes) break;
    std::uint8_t* const buffer = sink_.payload_buffer(frame, text_);
    if (!buffer) break;
    if (frame.bytes > 0) std::memcpy(buffer, frames, frame.bytes);
    frames += frame.bytes;
    frame_bytes -= frame.bytes;
    sink_.on_frame(frame, buffer);
    if (frame_bytes == 0 && !payload_expected) return;
  }
  end("it sent an invalid frame");
}

void Channel::receive_payload(const FrameHeader& frame, void* data, bool is_descriptor) {
  std::uint8_t* const buffer = sink_.payload_buffer(frame, text_);
  if (!buffer) return end("it sent an invalid frame");
  if (!is_descriptor) {
    std::memcpy(buffer, data, frame.bytes);
    sink_.on_frame(frame, buffer);
    return;
  }
  arriving_.push_back(std::make_unique<Arrival>(Arrival{this, frame, buffer}));
  ucp_request_param_t parameters{};
  parameters.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FLAG_NO_IMM_CMPL;
  parameters.cb.recv_am = &Channel::on_received;
  parameters.user_data = arriving_.back().get();
  const ucs_status_ptr_t request = ucx().ucp_am_recv_data_nbx(worker_.handle(), data, buffer, frame.bytes, &parameters);
  if (UCS_PTR_IS_ERR(request)) {
    arriving_.pop_back();
    end(failure(UCS_PTR_STATUS(request)));
  }
}

void Channel::on_received(void* request, ucs_status_t status, std::size_t length, void* arrival) {
  Channel& channel = *static_cast<Arrival*>(arrival)->channel;
  const std::unique_ptr<Arrival> arrived = take(channel.arriving_, arrival);
  if (status != UCS_OK) {
    channel.end(failure(status));
  } else if (length != arrived->frame.bytes) {
    channel.end("it sent an invalid frame");
  } else if (!channel.ended()) {
    channel.sink_.on_frame(arrived->frame, arrived->payload);
  }
  ucx().ucp_request_free(request);
}

void Channel::on_error(void* channel, ucp_ep_h, ucs_status_t status) {
  static_cast<Channel*>(channel)->end(failure(status));
}

void Channel::end(std::string reason) {
  if (!ended()) end_.set(std::move(reason));
}

ucs_status_ptr_t Channel::close() {
  end("closed");
  ucp_request_param_t parameters{};
  parameters.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
  parameters.flags = UCP_EP_CLOSE_FLAG_FORCE;
  return ucx().ucp_ep_close_nbx(std::exchange(endpoint_, nullptr), &parameters);
}

// UCX closes a socket at which it cannot accept a connection, as when the process has no descriptors left, but keeps a
// handler for its number, with a pointer to this worker's memory. A later worker that gets the number could not be
// made, and UCX would write to that memory. So the handlers are removed before a worker is made or destroyed.
void Worker::create() {
  const std::lock_guard<std::mutex> lock(process().mutex);
  for (Worker* const worker : process().workers) worker->forget_closed_sockets();
  const std::vector<ListeningSocket> before = listening_sockets();
  ucp_worker_params_t parameters{};
  parameters.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  parameters.thread_mode = UCS_THREAD_MODE_SERIALIZED;
  require_ok(ucx().ucp_worker_create(process().context, &parameters, &worker_), "ucp_worker_create");
  for (const ListeningSocket& socket : listening_sockets()) {
    if (std::find(before.begin(), before.end(), socket) != before.end()) continue;
    // Another thread may listen, too. These are the events that the handlers of UCX's sockets have.
    const int events = UCS_EVENT_SET_EVREAD | UCS_EVENT_SET_EVERR;
    if (ucx().ucs_async_modify_handler(socket.descriptor, events) == UCS_OK) listening_.push_back(socket);
  }
  process().workers.push_back(this);
}

void Worker::forget_closed_sockets() {
  for (auto socket = listening_.begin(); socket != listening_.end();) {
    if (socket->is_open()) {
      ++socket;
      continue;
    }
    ucx().ucs_async_remove_handler(socket->descriptor, 1);
    socket = listening_.erase(socket);
  }
}

Worker::Worker(std::uint64_t token) : token_(token) {
  create();
  try {
    ucp_am_handler_param_t handler{};
    handler.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_FLAGS |
                         UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG;
    handler.id = kMessageId;
    handler.flags = UCP_AM_FLAG_WHOLE_MSG;
    handler.cb = &Worker::on_message;
    handler.arg = this;
    require_ok(ucx().ucp_worker_set_am_recv_handler(worker_, &handler), "ucp_worker_set_am_recv_handler");
    require_ok(ucx().ucp_worker_get_efd(worker_, &event_fd_), "ucp_worker_get_efd");
    ucp_worker_attr_t attributes{};
    attributes.field_mask = UCP_WORKER_ATTR_FIELD_MAX_AM_HEADER;
    require_ok(ucx().ucp_worker_query(worker_, &attributes), "ucp_worker_query");
    if (attributes.max_am_header < kMaxBatch) {
      throw std::runtime_error(
          "the headers of UCX's messages are too short: " + std::to_string(attributes.max_am_header) + " bytes");
    }
  } catch (...) {
    destroy();
    throw;
  }
}

void Worker::destroy() {
  {
    const std::lock_guard<std::mutex> lock(process().mutex);
    forget_closed_sockets();
    std::vector<Worker*>& workers = process().workers;
    workers.erase(std::find(workers.begin(), workers.end(), this));
  }
  ucx().ucp_worker_destroy(worker_);
}

Worker::~Worker() {
  std::vector<ucs_status_ptr_t> requests;
  for (const auto& channel : channels_) {
    if (!channel) continue;
    const ucs_status_ptr_t request = channel->close();
    if (UCS_PTR_IS_PTR(request)) requests.push_back(request);
  }
  if (UCS_PTR_IS_PTR(flush_)) requests.push_back(flush_);
  const auto deadline = std::chrono::steady_clock::now() + kCloseTime;
  const auto is_open = [](ucs_status_ptr_t request) {
    return ucx().ucp_request_check_status(request) == UCS_INPROGRESS;
  };
  while (std::any_of(requests.begin(), requests.end(), is_open) && std::chrono::steady_clock::now() < deadline) {
    ucx().ucp_worker_progress(worker_);
  }
  for (const ucs_status_ptr_t request : requests) ucx().ucp_request_free(request);
  destroy();
}

std::string Worker::address() const {
  ucp_worker_attr_t attributes{};
  attributes.field_mask = UCP_WORKER_ATTR_FIELD_ADDRESS;
  require_ok(ucx().ucp_worker_query(worker_, &attributes), "ucp_worker_query");
  std::string address(reinterpret_cast<const char*>(&token_), sizeof token_);
  address.append(reinterpret_cast<const char*>(attributes.address), attributes.address_length);
  ucx().ucp_worker_release_address(worker_, attributes.address);
  return address;
}

FrameChannel& Worker::connect(std::uint32_t number, std::uint32_t own_number, const std::string& address,
                              FrameSink& sink) {
  auto channel = std::make_unique<Channel>(*this, own_number, address, sink);
  if (channels_.size() <= number) channels_.resize(number + std::size_t{1});
  channels_[number] = std::move(channel);
  return *channels_[number];
}

void Worker::progress() {
  for (unsigned events = 0; events < kMaxProgress;) {
    const unsigned count = ucx().ucp_worker_progress(worker_);
    if (count == 0) return;
    events += count;
  }
}

bool Worker::is_flushed() {
  if (!std::exchange(flush_started_, true)) {
    const ucp_request_param_t parameters{};
    flush_ = ucx().ucp_worker_flush_nbx(worker_, &parameters);
  }
  progress();
  return !UCS_PTR_IS_PTR(flush_) || ucx().ucp_request_check_status(flush_) != UCS_INPROGRESS;
}

ucs_status_t Worker::on_message(void* worker, const void* header, std::size_t header_bytes, void* data,
                                std::size_t bytes, const ucp_am_recv_param_t* parameters) {
  const Worker& self = *static_cast<Worker*>(worker);
  MessageHeader prefix;
  if (header_bytes < sizeof prefix) return UCS_OK;
  std::memcpy(&prefix, header, sizeof prefix);
  // Others can connect to the address, too: their messages are ignored.
  if (prefix.token != self.token_ || prefix.sender >= self.channels_.size()) return UCS_OK;
  Channel* const channel = self.channels_[prefix.sender].get();
  if (channel) {
    channel->receive(static_cast<const std::uint8_t*>(header) + sizeof prefix, header_bytes - sizeof prefix, data,
                     bytes, *parameters);
  }
  return UCS_OK;
}

}  // namespace

UcxDescription open_ucx(const std::vector<std::string>& libraries) {
  const std::lock_guard<std::mutex> lock(process().mutex);
  if (!process().context) {
    open_library(libraries);
    open_context();
  }
  return process().description;
}

std::unique_ptr<UcxWorker> make_ucx_worker(std::uint64_t token) {
  if (!process().context) throw std::runtime_error("UCX has not been opened");
  return std::make_unique<Worker>(token);
}

}  // namespace dtcomm

#else

namespace dtcomm {

UcxDescription open_ucx(const std::vector<std::string>&) {
  throw std::runtime_error("dtcomm was built without UCX headers; on Debian and Ubuntu: apt-get install libucx-dev");
}

std::unique_ptr<UcxWorker> make_ucx_worker(std::uint64_t) { throw std::runtime_error("built without UCX headers"); }

}  // namespace dtcomm

#endif
