#include "cpu/parallel.h"

#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <string>
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

// GCC's entry to an OpenMP team, which LLVM's and Intel's runtimes have too: runs work(data) on `threads` threads.
using Team = void (*)(void (*work)(void*), void* data, unsigned threads, unsigned flags);

// The OpenMP runtime that is loaded, torch's if there are several; null without one. Loads nothing.
Team find_team() {
    std::string path;
    dl_iterate_phdr(
        [](dl_phdr_info* info, size_t, void* found) {
            auto& best = *static_cast<std::string*>(found);
            const char* name = std::strrchr(info->dlpi_name, '/');
            const bool is_one =
                name && (std::strncmp(name, "/libgomp", 8) == 0 || std::strncmp(name, "/libiomp5", 9) == 0);
            if (is_one && (best.empty() || std::strstr(info->dlpi_name, "torch"))) best = info->dlpi_name;
            return 0;
        },
        &path);
    void* const runtime = path.empty() ? nullptr : dlopen(path.c_str(), RTLD_LAZY | RTLD_NOLOAD);
    return runtime ? reinterpret_cast<Team>(dlsym(runtime, "GOMP_parallel")) : nullptr;
}

// A forked child has none of the team's threads, and would wait for them: it goes back to a pool of its own.
std::atomic<bool> forked{false};
const int watch_forks = pthread_atfork(nullptr, nullptr, [] { forked = true; });

Team team() {
    static const Team found = find_team();
    return watch_forks == 0 && !forked ? found : nullptr;
}

// Cuts the work; `run(job, threads)` has it done.
template <typename Run>
void divide(int64_t count, int64_t grain, int threads, const std::function<void(int64_t, int64_t)>& body, Run&& run) {
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
        run(job, used);
    }
}

}  // namespace

void parallel_for(int64_t count, int64_t grain, int threads, const std::function<void(int64_t, int64_t)>& body) {
    divide(count, grain, threads, body, [](Job& job, int used) { pool().run(job, used - 1); });
}

void parallel_for_in_turn(int64_t count, int64_t grain, int threads,
                          const std::function<void(int64_t, int64_t)>& body) {
    divide(count, grain, threads, body, [threads](Job& job, int used) {
        if (const Team run = team()) {
            // All of them, as torch does it, though some may find nothing to do: a smaller team would end the rest.
            run([](void* data) { static_cast<Job*>(data)->work(); }, &job, static_cast<unsigned>(threads), 0);
        } else {
            pool().run(job, used - 1);
        }
    });
}

}  // namespace kbitq
