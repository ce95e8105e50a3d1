#include "cpu/parallel.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "cpu/float_env.h"

namespace kbitq {
namespace {

struct Job {
    const std::function<void(int64_t, int64_t)>* body;
    int64_t count;
    int64_t piece;
    std::atomic<int64_t> next{0};

    void work() noexcept {
        StrictFloat strict;
        for (;;) {
            const int64_t begin = next.fetch_add(piece, std::memory_order_relaxed);
            if (begin >= count) return;
            (*body)(begin, std::min(begin + piece, count));
        }
    }
};

class Pool {
  public:
    // Runs the job on the caller and up to `helpers` pool threads; returns when all have left it.
    void run(Job& job, int helpers) {
        std::lock_guard<std::mutex> one_job(entry_);
        {
            std::lock_guard<std::mutex> lock(mutex_);
            while (static_cast<int>(workers_.size()) < helpers) workers_.emplace_back([this] { serve(); });
            job_ = &job;
            wanted_ = helpers;
            busy_ = 0;
        }
        wake_.notify_all();
        job.work();
        std::unique_lock<std::mutex> lock(mutex_);
        wanted_ = 0;  // who has not come yet is not needed any more
        done_.wait(lock, [this] { return busy_ == 0; });
        job_ = nullptr;
    }

    pid_t owner = getpid();

  private:
    void serve() {
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            wake_.wait(lock, [this] { return wanted_ > 0; });
            --wanted_;
            ++busy_;
            Job* job = job_;
            lock.unlock();
            job->work();
            lock.lock();
            if (--busy_ == 0) done_.notify_one();
        }
    }

    std::mutex entry_, mutex_;
    std::condition_variable wake_, done_;
    std::vector<std::thread> workers_;
    Job* job_ = nullptr;
    int wanted_ = 0, busy_ = 0;
};

// Never destroyed: its threads may still wait while the process ends. A forked child has none of its parent's threads,
// so it gets a pool of its own.
Pool& pool() {
    static std::mutex guard;
    static Pool* current = nullptr;
    std::lock_guard<std::mutex> lock(guard);
    if (!current || current->owner != getpid()) current = new Pool;
    return *current;
}

}  // namespace

void parallel_for(int64_t count, int64_t grain, int threads, const std::function<void(int64_t, int64_t)>& body) {
    if (count <= 0) return;
    grain = std::max<int64_t>(grain, 1);
    const int64_t most = (count + grain - 1) / grain;
    const int used = static_cast<int>(std::min<int64_t>(std::max(threads, 1), most));
    // Several pieces a thread, so that a slow core does not hold up the others.
    const int64_t piece = used == 1 ? count : std::max(grain, count / (int64_t{8} * used));
    Job job{&body, count, piece};
    if (used == 1) {
        job.work();
    } else {
        pool().run(job, used - 1);
    }
}

}  // namespace kbitq
