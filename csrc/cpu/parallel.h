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

}  // namespace kbitq
