#pragma once

#include <string>

#include "fabric/socket.h"

namespace kvmesh::fabric {

// Wakes a peer on the same host that sleeps, for providers whose completion queues cannot: a datagram socket with a
// random abstract name. A full socket means that the peer is being woken already.
class Doorbell {
  public:
    Doorbell();

    const std::string& name() const { return name_; }
    // Readable once somebody rang, until `silence`.
    int fd() const { return socket_.get(); }
    void silence();
    void ring(const std::string& name);

  private:
    FileDescriptor socket_;
    std::string name_;
};

}  // namespace kvmesh::fabric
