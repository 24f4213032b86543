// One pool of threads for all kernels: small tasks taken from a shared counter.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace tokenmill {

// `run` is called by one thread at a time, which works too. A thread that the system has preempted delays only the
// task it holds: nobody waits for a thread that has taken none. Idle threads spin for some microseconds, as the next
// operation of a step follows at once, and then sleep, so that they take nothing from other processes.
class Pool {
  public:
    explicit Pool(int threads);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    // Binds each thread but the caller's, which is the first, to the CPU at its place; false: the system refuses.
    bool pin(const int32_t* cpus);

    int threads() const { return static_cast<int>(workers_.size()) + 1; }

    // Calls body(task, thread) for every task in 0..tasks-1, thread in 0..threads()-1, and returns when all are done.
    template <class Body>
    void run(int64_t tasks, const Body& body) {
        if (tasks <= 1 || workers_.empty()) {
            for (int64_t task = 0; task < tasks; task++) body(task, 0);
            return;
        }
        start(tasks, [](const void* context, int64_t task, int thread) {
            (*static_cast<const Body*>(context))(task, thread);
        }, &body);
    }

    // Likewise, but each thread takes tasks that follow one another, as long as there are any of its share.
    template <class Body>
    void run_in_turn(int64_t tasks, const Body& body) {
        const int64_t shares = threads();
        for (int64_t i = 0; i < shares; i++) {
            shares_[i].next.store(tasks * i / shares, std::memory_order_relaxed);
            shares_[i].end = tasks * (i + 1) / shares;
        }
        run(tasks, [&](int64_t, int thread) { body(take_in_turn(thread), thread); });
    }

  private:
    struct alignas(64) Share {
        std::atomic<int64_t> next{0};
        int64_t end = 0;
    };

    int64_t take_in_turn(int thread);

    using Function = void (*)(const void*, int64_t, int);

    void end();
    void start(int64_t tasks, Function function, const void* context);
    bool take_one(int thread);
    void work(int thread);

    // Number of the job in the upper half, tasks not yet taken in the lower: a thread that comes late can't take a task
    // of another job than the one it saw.
    alignas(64) std::atomic<uint64_t> ticket_{0};
    alignas(64) std::atomic<int64_t> done_{0};
    alignas(64) std::atomic<int> sleepers_{0};
    Function function_ = nullptr;
    const void* context_ = nullptr;
    int64_t tasks_ = 0;
    std::atomic<bool> stop_{false};
    std::mutex mutex_;
    std::condition_variable wake_;
    std::vector<std::thread> workers_;
    std::unique_ptr<Share[]> shares_;  // one a thread
};

}  // namespace tokenmill
