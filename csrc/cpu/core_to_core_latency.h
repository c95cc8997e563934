// The latency between two CPUs: the time a cache line takes to the other one and back.
#pragma once

namespace dtcomm {

// Nanoseconds per round trip: the 10th percentile over `batches` batches of `trips`, as other work on the CPUs can only
// add time. Negative if threads may not run on one of the CPUs.
double round_trip_ns(int cpu_a, int cpu_b, int batches, int trips);

}  // namespace dtcomm
