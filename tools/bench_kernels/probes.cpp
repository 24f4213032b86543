// What this machine can do at most, with the widest vectors that the kernels' instruction set has: reading memory,
// multiply-adds of float32, of 16-bit and of 8-bit integers. Each probe repeats a pass on all threads and returns the best one.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <new>
#include <thread>
#include <utility>
#include <vector>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

using Clock = std::chrono::steady_clock;

constexpr int kChains = 12;          // independent sums: enough for two units of latency 5, few enough for 16 registers
constexpr int64_t kRounds = 400000;  // of a pass, some milliseconds: starting threads takes none of it worth noting
constexpr int64_t kLine = 64;

double seconds_of(int threads, const std::function<void(int)>& body) {
    const auto began = Clock::now();
    std::vector<std::thread> others;
    const auto join_all = [&] {
        for (auto& thread : others) thread.join();
    };
    try {
        for (int i = 1; i < threads; i++) others.emplace_back(body, i);
    } catch (...) {
        join_all();
        throw;
    }
    body(0);
    join_all();
    return std::chrono::duration<double>(Clock::now() - began).count();
}

// Units of work a second in the best of the passes that fit into `seconds`, at least two.
double best_rate(int threads, double seconds, double work, const std::function<void(int)>& body) {
    double best = 0.0, spent = 0.0;
    for (int pass = 0; pass < 2 || spent < seconds; pass++) {
        const double took = seconds_of(threads, body);
        best = std::max(best, work / took);
        spent += took;
    }
    return best;
}

uint64_t sum_of(const unsigned char* data, int64_t bytes) {
#if defined(__AVX2__)
    __m256i sums[8];
    for (auto& sum : sums) sum = _mm256_setzero_si256();
    for (int64_t at = 0; at + 256 <= bytes; at += 256) {
        for (int i = 0; i < 8; i++) {
            const auto* from = reinterpret_cast<const __m256i*>(data + at + 32 * i);
            sums[i] = _mm256_add_epi64(sums[i], _mm256_load_si256(from));
        }
    }
    for (int i = 1; i < 8; i++) sums[0] = _mm256_add_epi64(sums[0], sums[i]);
    uint64_t parts[4];
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(parts), sums[0]);
    return parts[0] + parts[1] + parts[2] + parts[3];
#else
    uint64_t sums[8] = {};
    for (int64_t at = 0; at + 64 <= bytes; at += 64) {
        uint64_t words[8];
        std::memcpy(words, data + at, 64);
        for (int i = 0; i < 8; i++) sums[i] += words[i];
    }
    uint64_t total = 0;
    for (const uint64_t sum : sums) total += sum;
    return total;
#endif
}

// Takes sums through `step`, kRounds * kChains times in all. They are spelled out, since GCC keeps an array that a loop
// indexes in memory, and start apart, since it computes equal ones once. A bit of each goes where it is not left out.
template <class Start, class Step, size_t... I>
void chain(const Start& start, const Step& step, std::index_sequence<I...>) {
    using Vector = decltype(start(0));
    Vector sums[] = {start(static_cast<int>(I))...};
    const int64_t rounds = kRounds * kChains / static_cast<int64_t>(sizeof...(I));
    for (int64_t round = 0; round < rounds; round++) ((sums[I] = step(sums[I])), ...);
    unsigned part, mixed = 0;
    ((std::memcpy(&part, &sums[I], sizeof part), mixed ^= part), ...);
    [[maybe_unused]] volatile unsigned sink = mixed;
}

template <int kSums = kChains, class Start, class Step>
void multiply(const Start& start, const Step& step) {
    chain(start, step, std::make_index_sequence<kSums>());
}

#if defined(__AVX512F__)
constexpr int kFloats = 16;
void multiply_floats() {
    const __m512 factor = _mm512_set1_ps(0.999f), added = _mm512_set1_ps(0.001f);
    const auto start = [](int i) { return _mm512_set1_ps(static_cast<float>(i)); };
    multiply(start, [=](__m512 sum) { return _mm512_fmadd_ps(sum, factor, added); });
}
#elif defined(__AVX2__)
constexpr int kFloats = 8;
void multiply_floats() {
    const __m256 factor = _mm256_set1_ps(0.999f), added = _mm256_set1_ps(0.001f);
    const auto start = [](int i) { return _mm256_set1_ps(static_cast<float>(i)); };
    multiply(start, [=](__m256 sum) { return _mm256_fmadd_ps(sum, factor, added); });
}
#else
constexpr int kFloats = 4;
void multiply_floats() {
    using Four = float __attribute__((vector_size(16)));
    const auto start = [](int i) { return Four{} + static_cast<float>(i); };
    multiply(start, [](Four sum) { return sum * 0.999f + 0.001f; });
}
#endif

// As the kernels of int8 weights: dot products of two pairs of int16 and a sum of 32 bits.
#if defined(__AVX512VNNI__)
constexpr int kCodes = 32;
void multiply_codes() {
    const __m512i codes = _mm512_set1_epi16(3), inputs = _mm512_set1_epi16(5);
    using Sums = int __attribute__((vector_size(64)));  // as a __m512i, GCC copies them in each round
    multiply([](int i) { return Sums{} + i; }, [=](Sums sum) {
        return reinterpret_cast<Sums>(_mm512_dpwssd_epi32(reinterpret_cast<__m512i>(sum), codes, inputs));
    });
}
#elif defined(__AVX2__)
constexpr int kCodes = 16;
void multiply_codes() {
    const __m256i codes = _mm256_set1_epi16(3);
    __m256i inputs = _mm256_set1_epi16(5);
    // Six are enough: products don't wait for each other, and an addition takes one cycle.
    using Sums = unsigned __attribute__((vector_size(32)));  // as a __m256i, GCC copies them in each round
    multiply<6>([](int i) { return Sums{} + static_cast<unsigned>(i); }, [&](Sums sum) {
        asm volatile("" : "+x"(inputs));  // else it multiplies once, since it takes them for unchanged
        return sum + reinterpret_cast<Sums>(_mm256_madd_epi16(codes, inputs));
    });
}
#else
constexpr int kCodes = 16;
void multiply_codes() {
    int16_t codes[kChains * kCodes], inputs[kChains * kCodes];
    std::fill(codes, codes + kChains * kCodes, int16_t{3});
    std::fill(inputs, inputs + kChains * kCodes, int16_t{5});
    uint32_t total = 0;
    for (int64_t round = 0; round < kRounds; round++) {
        asm volatile("" : : "r"(codes), "r"(inputs) : "memory");  // as above: they might have changed
        for (int i = 0; i < kChains * kCodes; i++) total += static_cast<uint32_t>(codes[i] * inputs[i]);
    }
    [[maybe_unused]] volatile uint32_t sink = total;
}
#endif

// As the kernels of int4 weights: dot products of four pairs of bytes into 32 bits, or of two pairs and a sum of 16 bits.
#if defined(__AVX512VNNI__)
constexpr int kBytes = 64;
void multiply_bytes() {
    const __m512i codes = _mm512_set1_epi8(3), inputs = _mm512_set1_epi8(5);
    using Sums = int __attribute__((vector_size(64)));
    multiply([](int i) { return Sums{} + i; }, [=](Sums sum) {
        return reinterpret_cast<Sums>(_mm512_dpbusd_epi32(reinterpret_cast<__m512i>(sum), codes, inputs));
    });
}
#elif defined(__AVX2__)
constexpr int kBytes = 32;
void multiply_bytes() {
    const __m256i codes = _mm256_set1_epi8(3);
    __m256i inputs = _mm256_set1_epi8(5);
    using Sums = unsigned short __attribute__((vector_size(32)));
    multiply<6>([](int i) { return Sums{} + static_cast<unsigned short>(i); }, [&](Sums sum) {
        asm volatile("" : "+x"(inputs));  // else it multiplies once, since it takes them for unchanged
        return sum + reinterpret_cast<Sums>(_mm256_maddubs_epi16(codes, inputs));
    });
}
#else
constexpr int kBytes = kCodes;  // without vectors, a product is a product
void multiply_bytes() { multiply_codes(); }
#endif

struct Free {
    void operator()(unsigned char* p) const { std::free(p); }
};

double read_rate(int64_t bytes, int threads, double seconds) {
    const int64_t share = bytes / threads / 256 * 256;
    const std::unique_ptr<unsigned char, Free> data(
        static_cast<unsigned char*>(std::aligned_alloc(kLine, static_cast<size_t>(share * threads))));
    if (!data) throw std::bad_alloc();
    // Written by the thread that reads it, so that each has its part in the memory next to it.
    seconds_of(threads, [&](int i) { std::memset(data.get() + i * share, i + 1, static_cast<size_t>(share)); });
    const auto body = [&](int i) { [[maybe_unused]] volatile uint64_t sink = sum_of(data.get() + i * share, share); };
    return best_rate(threads, seconds, static_cast<double>(share) * threads, body);
}

template <class Body>
double guarded(const Body& body) {
    try {
        return body();
    } catch (const std::exception&) {
        return -1.0;
    }
}

}  // namespace

#define PROBE_EXPORT extern "C" __attribute__((visibility("default")))

// All return a rate per second for all threads together, or a negative number when memory or threads are lacking.

// Bytes read, of `bytes` bytes divided among the threads.
PROBE_EXPORT double probe_read(int64_t bytes, int32_t threads, double seconds) {
    return guarded([&] { return read_rate(bytes, threads, seconds); });
}

// float32 operations, two to a multiply-add.
PROBE_EXPORT double probe_float32(int32_t threads, double seconds) {
    const double work = 2.0 * kFloats * kChains * kRounds * threads;
    return guarded([&] {
        return best_rate(threads, seconds, work, [](int) { multiply_floats(); });
    });
}

// 8-bit operations, likewise.
PROBE_EXPORT double probe_int8(int32_t threads, double seconds) {
    const double work = 2.0 * kBytes * kChains * kRounds * threads;
    return guarded([&] {
        return best_rate(threads, seconds, work, [](int) { multiply_bytes(); });
    });
}

// 16-bit operations, two to a multiply-add.
PROBE_EXPORT double probe_int16(int32_t threads, double seconds) {
    const double work = 2.0 * kCodes * kChains * kRounds * threads;
    return guarded([&] {
        return best_rate(threads, seconds, work, [](int) { multiply_codes(); });
    });
}
