// How far apart two CPUs are: what a cache line takes to go to the other and back.
#pragma once

namespace dtcomm {

// Nanoseconds a round trip, the 10th percentile of `batches` batches of `trips`: whatever else runs on the two can only
// add. Negative where a thread may not run on one of them.
double round_trip_ns(int cpu_a, int cpu_b, int batches, int trips);

}  // namespace dtcomm
