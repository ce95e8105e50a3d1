// A parallel loop over [0, count) on a small pool of threads that stays between calls (starting one costs more than a
// small tensor). The caller's thread takes part. Pieces are handed out in order, so a result must not depend on who
// gets which.
#pragma once

#include <cstdint>
#include <functional>

namespace kbitq {

// Calls body(begin, end) for pieces of at least `grain` items until [0, count) is covered, on at most `threads`
// threads, each under StrictFloat. Exceptions in a body end the process: bodies compute, they do not throw.
void parallel_for(int64_t count, int64_t grain, int threads, const std::function<void(int64_t, int64_t)>& body);

// The same on the threads of the OpenMP runtime that the process has already (torch's), where there is one. Those keep
// spinning for milliseconds after each of torch's own loops: a short loop between two of torch's would have to share
// the cores with them if it ran on other threads. For the layers of a model; the codec works beside torch, not in
// turns.
void parallel_for_in_turn(int64_t count, int64_t grain, int threads, const std::function<void(int64_t, int64_t)>& body);

}  // namespace kbitq
