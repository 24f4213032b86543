// From logits to a token: temperature, top-k, top-p (Holtzman et al. 2020), min-p, and a draw by inverse CDF in the order
// of the vocabulary. `gpu_workers/sampling.py` says what each means; both keep all equals at the edge of a filter.
//
// Limits are found without sorting the vocabulary: what surely lies beyond is dropped first.
#include "sample.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>

#include "simd.h"

namespace tokenmill {

namespace {

constexpr int64_t kBlock = 64;       // logits with a maximum of their own
constexpr int64_t kDrawBlock = 512;  // weights with a sum of their own
constexpr int kMassShift = 20;       // weights with the same upper 12 bits, an eighth of an octave, are counted together
constexpr size_t kMasses = (0x3f800000u >> kMassShift) + 1;  // weights are at most 1
constexpr float kInfinity = std::numeric_limits<float>::infinity();

int64_t end_of(int64_t start, int64_t block, int64_t count) { return std::min(start + block, count); }

// NaN is passed over: the sum of the weights shows it.
float largest(const float* x, int64_t count) {
    F8 best = set8(-kInfinity);
    int64_t i = 0;
    for (; i + 8 <= count; i += 8) best = max8(load8(x + i), best);
    float result = largest8(best);
    for (; i < count; i++) result = x[i] > result ? x[i] : result;
    return result;
}

bool any_nan(const float* x, int64_t count) {
    int found = 0;
    for (int64_t i = 0; i < count; i++) found |= x[i] != x[i];
    return found != 0;
}

int64_t greedy(const float* x, int64_t count) {
    if (any_nan(x, count)) return -1;
    return std::find(x, x + count, largest(x, count)) - x;
}

// weights = exp((x - top) / temperature); their sum, which is NaN if one is.
double exponentiate(const float* x, int64_t count, float top, float temperature, float* weights) {
    const float inverse = 1.0f / temperature;
    double total = 0.0;
    for (int64_t start = 0; start < count; start += kDrawBlock) {
        const int64_t end = end_of(start, kDrawBlock, count);
        F8 sums = zero8();
        int64_t i = start;
        for (; i + 8 <= end; i += 8) {
            const F8 weight = exp8((load8(x + i) - set8(top)) * set8(inverse));
            store8(weights + i, weight);
            sums = sums + weight;
        }
        float sum = sum8(sums);
        for (; i < end; i++) {
            float eight[8];
            store8(eight, exp8(set8((x[i] - top) * inverse)));
            weights[i] = eight[0];
            sum += eight[0];
        }
        total += sum;
    }
    return total;
}

// Those of `values` that are at least `least`; blocks whose maximum is below it are not looked at.
void collect(const float* values, int64_t count, const std::vector<float>& maxima, float least, std::vector<float>& out) {
    out.resize(static_cast<size_t>(count));
    size_t size = 0;
    for (size_t b = 0; b < maxima.size(); b++) {
        if (maxima[b] < least) continue;
        const int64_t start = static_cast<int64_t>(b) * kBlock, end = end_of(start, kBlock, count);
        for (int64_t i = start; i < end; i++) {
            // Without a branch, which would be foreseen badly.
            out[size] = values[i];
            size += values[i] >= least;
        }
    }
    out.resize(size);
}

void block_maxima(const float* values, int64_t count, std::vector<float>& maxima) {
    maxima.clear();
    for (int64_t start = 0; start < count; start += kBlock) {
        maxima.push_back(largest(values + start, end_of(start, kBlock, count) - start));
    }
}

float kth_largest(std::vector<float>& values, int64_t k) {
    std::nth_element(values.begin(), values.begin() + (k - 1), values.end(), std::greater<float>());
    return values[static_cast<size_t>(k - 1)];
}

// The k-th largest of the logits, which are numbers; 0 < k < count.
float top_k_limit(const float* x, int64_t count, int64_t k, SampleScratch& scratch) {
    block_maxima(x, count, scratch.maxima);
    float least = -kInfinity;
    if (k <= static_cast<int64_t>(scratch.maxima.size())) {
        // There are k blocks with a maximum of at least this, so there are k logits.
        scratch.candidates = scratch.maxima;
        least = kth_largest(scratch.candidates, k);
    }
    collect(x, count, scratch.maxima, least, scratch.candidates);
    return kth_largest(scratch.candidates, k);
}

size_t mass_index(float weight) {
    uint32_t bits;
    std::memcpy(&bits, &weight, 4);
    return bits >> kMassShift;
}

// The smallest weight that is kept: that of the last of the fewest best ones whose sum reaches `top_p` of the total.
float top_p_limit(const float* weights, int64_t count, double total, double top_p, SampleScratch& scratch) {
    const double wanted = top_p * total;
    // All weights below this are less than what may be left out, together.
    const auto least = static_cast<float>(0.5 * (total - wanted) / static_cast<double>(count));
    block_maxima(weights, count, scratch.maxima);
    collect(weights, count, scratch.maxima, std::max(least, std::numeric_limits<float>::min()), scratch.candidates);
    std::vector<float>& candidates = scratch.candidates;
    scratch.masses.assign(kMasses, 0.0);
    for (float weight : candidates) scratch.masses[mass_index(weight)] += weight;
    double mass = 0.0;
    for (size_t index = kMasses; index-- > 0;) {
        if (mass + scratch.masses[index] < wanted) {
            mass += scratch.masses[index];
            continue;
        }
        const auto end = std::partition(candidates.begin(), candidates.end(),
                                        [=](float weight) { return mass_index(weight) == index; });
        std::sort(candidates.begin(), end, std::greater<float>());
        for (auto at = candidates.begin(); at != end; ++at) {
            mass += *at;
            if (mass >= wanted) return *at;
        }
        // In another order, the sum may end a little lower. (The weight 1 is in the first bucket, so none is empty here.)
        return *(end - 1);
    }
    return 0.0f;
}

// Weights below `limit` become 0, and those of logits below `logit_limit`; the sum of those that are left.
double keep(const float* x, int64_t count, float logit_limit, float limit, float* weights) {
    double total = 0.0;
    for (int64_t start = 0; start < count; start += kDrawBlock) {
        const int64_t end = end_of(start, kDrawBlock, count);
        F8 sums = zero8();
        int64_t i = start;
        for (; i + 8 <= end; i += 8) {
            F8 weight = load8(weights + i);
            weight = keep_unless_less(keep_unless_less(weight, load8(x + i), set8(logit_limit)), weight, set8(limit));
            store8(weights + i, weight);
            sums = sums + weight;
        }
        float sum = sum8(sums);
        for (; i < end; i++) {
            if (x[i] < logit_limit || weights[i] < limit) weights[i] = 0.0f;
            sum += weights[i];
        }
        total += sum;
    }
    return total;
}

// Of start..end-1. The sum over single weights may end a little below that of the block: then its last possible id.
int64_t draw_in(const float* weights, int64_t start, int64_t end, double before, double target) {
    int64_t last = start;
    for (int64_t i = start; i < end; i++) {
        before += weights[i];
        if (weights[i] > 0.0f) last = i;
        if (before > target) return i;
    }
    return last;
}

// The first id at which the running sum of the weights exceeds `target`.
int64_t draw(const float* weights, int64_t count, double target) {
    double before = 0.0;
    for (int64_t start = 0; start < count; start += kDrawBlock) {
        const int64_t end = end_of(start, kDrawBlock, count);
        F8 sums = zero8();
        int64_t i = start;
        for (; i + 8 <= end; i += 8) sums = sums + load8(weights + i);
        float sum = sum8(sums);
        for (; i < end; i++) sum += weights[i];
        if (before + sum > target) return draw_in(weights, start, end, before, target);
        before += sum;
    }
    return draw_in(weights, 0, count, 0.0, target);  // rounded, the target is no less than the sum
}

}  // namespace

void SampleScratch::reserve(int64_t vocab_size) {
    const auto count = static_cast<size_t>(vocab_size);
    weights.reserve(count);
    maxima.reserve(count / kBlock + 1);
    candidates.reserve(count);
    masses.reserve(kMasses);
}

int64_t sample_row(const TmSampling& sampling, int64_t row, SampleScratch& scratch) {
    const int64_t count = sampling.vocab_size;
    const float* x = sampling.logits + row * count;
    const float temperature = sampling.temperature[row];
    if (temperature == 0.0f) return greedy(x, count);

    scratch.weights.resize(static_cast<size_t>(count));
    float* weights = scratch.weights.data();
    double total = exponentiate(x, count, largest(x, count), temperature, weights);
    if (std::isnan(total)) return -1;

    const int64_t top_k = sampling.top_k[row];
    if (top_k > 0 && top_k < count) {
        const float limit = top_k_limit(x, count, top_k, scratch);
        total = keep(x, count, limit, 0.0f, weights);
    }
    // The largest weight is 1.
    float limit = sampling.min_p[row];
    const double top_p = sampling.top_p[row];
    if (top_p < 1.0) limit = std::max(limit, top_p_limit(weights, count, total, top_p, scratch));
    if (limit > 0.0f) total = keep(x, count, -kInfinity, limit, weights);
    return draw(weights, count, sampling.uniforms[row] * total);
}

}  // namespace tokenmill
