#include "pool.h"

#include <chrono>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace tokenmill {

namespace {

constexpr auto kSpin = std::chrono::microseconds(50);  // before an idle thread sleeps
constexpr int kPausesBetweenClockReads = 64;

inline void pause() {
#if defined(__x86_64__)
    _mm_pause();
#endif
}

constexpr uint64_t kRemaining = 0xffffffffu;

}  // namespace

Pool::Pool(int threads) : shares_(new Share[static_cast<size_t>(threads > 1 ? threads : 1)]) {
    try {
        for (int i = 1; i < threads; i++) workers_.emplace_back([this, i] { work(i); });
    } catch (...) {
        end();
        throw;
    }
}

Pool::~Pool() { end(); }

void Pool::end() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        stop_.store(true);
    }
    wake_.notify_all();
    for (auto& worker : workers_) worker.join();
}

bool Pool::pin([[maybe_unused]] const int32_t* cpus) {
#if defined(__linux__)
    for (size_t i = 0; i < workers_.size(); i++) {
        const int32_t cpu = cpus[i + 1];
        if (cpu < 0 || cpu >= CPU_SETSIZE) return false;
        cpu_set_t set;
        CPU_ZERO(&set);
        CPU_SET(static_cast<size_t>(cpu), &set);
        if (pthread_setaffinity_np(workers_[i].native_handle(), sizeof set, &set) != 0) return false;
    }
    return true;
#else
    return false;
#endif
}

void Pool::start(int64_t tasks, Function function, const void* context) {
    function_ = function;
    context_ = context;
    tasks_ = tasks;
    done_.store(0, std::memory_order_relaxed);
    const uint64_t job = (ticket_.load(std::memory_order_relaxed) >> 32) + 1;
    ticket_.store(job << 32 | static_cast<uint64_t>(tasks));
    if (sleepers_.load() > 0) {
        // Taking the lock orders this after a sleeper's last look at the ticket.
        { std::lock_guard<std::mutex> lock(mutex_); }
        wake_.notify_all();
    }
    while (take_one(0)) {
    }
    for (int spins = 0; done_.load(std::memory_order_acquire) != tasks; spins++) {
        // Whoever holds the last task may have been preempted: let it have this core.
        if (spins < 4096) pause();
        else std::this_thread::yield();
    }
}

bool Pool::take_one(int thread) {
    uint64_t ticket = ticket_.load(std::memory_order_acquire);
    do {
        if ((ticket & kRemaining) == 0) return false;
    } while (!ticket_.compare_exchange_weak(ticket, ticket - 1, std::memory_order_acq_rel, std::memory_order_acquire));
    // The job lives until this task is counted as done, so its fields can be read now.
    function_(context_, tasks_ - static_cast<int64_t>(ticket & kRemaining), thread);
    done_.fetch_add(1, std::memory_order_release);
    return true;
}

// As many calls as there are tasks, so each finds one.
int64_t Pool::take_in_turn(int thread) {
    for (int i = thread;; i = i + 1 < threads() ? i + 1 : 0) {
        Share& share = shares_[i];
        if (share.next.load(std::memory_order_relaxed) >= share.end) continue;
        const int64_t task = share.next.fetch_add(1, std::memory_order_relaxed);
        if (task < share.end) return task;
    }
}

void Pool::work(int thread) {
    auto idle_since = std::chrono::steady_clock::now();
    while (!stop_.load(std::memory_order_relaxed)) {
        if (take_one(thread)) {
            while (take_one(thread)) {
            }
            idle_since = std::chrono::steady_clock::now();
            continue;
        }
        for (int i = 0; i < kPausesBetweenClockReads && (ticket_.load(std::memory_order_relaxed) & kRemaining) == 0; i++) {
            pause();
        }
        if (std::chrono::steady_clock::now() - idle_since < kSpin) continue;
        std::unique_lock<std::mutex> lock(mutex_);
        sleepers_.fetch_add(1);
        wake_.wait(lock, [this] { return stop_.load() || (ticket_.load() & kRemaining) != 0; });
        sleepers_.fetch_sub(1);
        idle_since = std::chrono::steady_clock::now();
    }
}

}  // namespace tokenmill
