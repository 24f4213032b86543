#include "weight.h"

#include <sys/mman.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>

#include "vectors.h"

namespace tokenmill {

namespace {

constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kChunk = 16 * kHugePage;

size_t round_up(size_t size, size_t multiple) { return (size + multiple - 1) / multiple * multiple; }

#if defined(__SANITIZE_ADDRESS__)

// One allocation a weight, so that reading past its end is noticed.
std::shared_ptr<unsigned char> zeroed(size_t bytes) {
    void* memory = std::aligned_alloc(64, round_up(bytes, 64));
    if (memory == nullptr) throw std::bad_alloc();
    std::memset(memory, 0, round_up(bytes, 64));
    return {static_cast<unsigned char*>(memory), [](unsigned char* p) { std::free(p); }};
}

#else

// Weights lie side by side in large pages: a decode step reads all of them, one address translation after the other.
// A chunk is given back when its last weight is gone.
std::shared_ptr<unsigned char> zeroed(size_t bytes) {
    static std::mutex mutex;
    static std::weak_ptr<unsigned char> latest;
    static size_t used = 0, size = 0;
    const std::lock_guard<std::mutex> lock(mutex);
    bytes = round_up(bytes, 64);
    std::shared_ptr<unsigned char> chunk = latest.lock();
    if (!chunk || used + bytes > size) {
        const size_t wanted = round_up(bytes, kChunk);
        // Pages come zeroed, and take memory when they are first written.
        void* memory = mmap(nullptr, wanted + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED) throw std::bad_alloc();
        auto* start = reinterpret_cast<unsigned char*>(round_up(reinterpret_cast<size_t>(memory), kHugePage));
#ifdef MADV_HUGEPAGE
        madvise(start, wanted, MADV_HUGEPAGE);
#endif
        chunk = {start, [memory, wanted](unsigned char*) { munmap(memory, wanted + kHugePage); }};
        latest = chunk;
        size = wanted;
        used = 0;
    }
    used += bytes;
    return {chunk, chunk.get() + used - bytes};
}

#endif

// The groups of panel p are at groups(p)[g].
template <class Group>
Group* groups_of(const Weight& weight, int64_t panel) {
    return reinterpret_cast<Group*>(weight.data + panel * weight.panel_bytes());
}

// Where a bfloat16 panel has column c of an input.
int64_t pair_place(int64_t c) { return c % kLanes * 2 + c / kLanes; }

}  // namespace

float half_to_float(uint16_t x) {
    const uint32_t sign = static_cast<uint32_t>(x & 0x8000u) << 16;
    const uint32_t exponent = (x >> 10) & 31u, mantissa = x & 1023u;
    float value;
    if (exponent == 0) {
        value = std::ldexp(static_cast<float>(mantissa), -24);
    } else if (exponent == 31) {
        value = mantissa ? NAN : INFINITY;
    } else {
        value = std::ldexp(static_cast<float>(mantissa + 1024u), static_cast<int>(exponent) - 25);
    }
    return sign ? -value : value;
}

uint16_t float_to_half(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
    if (std::isnan(x)) return sign | 0x7e00u;
    const float magnitude = std::fabs(x);
    if (magnitude >= 65520.0f) return sign | 0x7c00u;
    if (magnitude < 6.103515625e-05f) {  // subnormal: a whole number of 2^-24
        return sign | static_cast<uint16_t>(std::nearbyintf(std::ldexp(magnitude, 24)));
    }
    int exponent;
    const float fraction = std::frexp(magnitude, &exponent);  // in [0.5, 1)
    const auto mantissa = static_cast<uint32_t>(std::nearbyintf(std::ldexp(fraction, 11)));  // 1024..2048
    return sign | static_cast<uint16_t>(((exponent + 14) << 10) + static_cast<int>(mantissa - 1024u));
}

Weight::Weight(Kind kind, int64_t n, int64_t k) : kind(kind), n(n), k(k) {
    // Zeros, for the columns that fill up the last panel.
    memory_ = zeroed(static_cast<size_t>(panels() * panel_bytes()));
    data = memory_.get();
}

int64_t Weight::panel_bytes() const {
    switch (kind) {
        case Kind::kFloat32: return k * kFloatColumns * 4;
        case Kind::kBfloat16: return k * kFloatColumns * 2;
        case Kind::kInt4: return k / kGroup * static_cast<int64_t>(sizeof(Int4Group));
        case Kind::kInt8: return k / kGroup * static_cast<int64_t>(sizeof(Int8Group));
    }
    return 0;
}

void Weight::pack_float(const float* source) {
    for (int64_t row = 0; row < n; row++) {
        const int64_t c = row % kFloatColumns;
        unsigned char* panel = data + row / kFloatColumns * panel_bytes();
        const float* from = source + row * k;
        if (kind == Kind::kFloat32) {
            float* to = reinterpret_cast<float*>(panel) + c;
            for (int64_t i = 0; i < k; i++) to[i * kFloatColumns] = from[i];
        } else {
            bf16* to = reinterpret_cast<bf16*>(panel) + pair_place(c);
            for (int64_t i = 0; i < k; i++) to[i * kFloatColumns] = float_to_bf16(from[i]);
        }
    }
}

void Weight::pack_int4(const uint8_t* codes, const float* scales, const float* minimums) {
    const int64_t groups = k / kGroup;
    for (int64_t row = 0; row < n; row++) {
        const int64_t c = row % kLanes;
        Int4Group* to = groups_of<Int4Group>(*this, row / kLanes);
        for (int64_t g = 0; g < groups; g++) {
            const uint8_t* from = codes + row * k + g * kGroup;
            to[g].scale[c] = {float_to_half(scales[row * groups + g])};
            to[g].minimum[c] = {minimums ? float_to_half(minimums[row * groups + g]) : uint16_t{0}};
            for (int j = 0; j < 4; j++) {
                for (int i = 0; i < 4; i++) {
                    to[g].codes[j][4 * c + i] = static_cast<uint8_t>(from[4 * j + i] | from[4 * (j + 4) + i] << 4);
                }
            }
        }
    }
}

void Weight::pack_int8(const int8_t* codes, const float* scales) {
    const int64_t groups = k / kGroup;
    for (int64_t row = 0; row < n; row++) {
        const int64_t c = row % kLanes;
        Int8Group* to = groups_of<Int8Group>(*this, row / kLanes);
        for (int64_t g = 0; g < groups; g++) {
            const int8_t* from = codes + row * k + g * kGroup;
            to[g].scale[c] = {float_to_half(scales[row * groups + g])};
            for (int j = 0; j < 8; j++) std::memcpy(&to[g].codes[j][4 * c], from + 4 * j, 4);
        }
    }
}

void Weight::read_row(int64_t index, float* out) const {
    const unsigned char* start = panel(index / panel_width(kind));
    const int64_t c = index % panel_width(kind);
    switch (kind) {
        case Kind::kFloat32:
            for (int64_t i = 0; i < k; i++) out[i] = reinterpret_cast<const float*>(start)[i * kFloatColumns + c];
            return;
        case Kind::kBfloat16:
            for (int64_t i = 0; i < k; i++) {
                out[i] = bf16_to_float(reinterpret_cast<const bf16*>(start)[i * kFloatColumns + pair_place(c)]);
            }
            return;
        case Kind::kInt4: {
            const auto* groups = reinterpret_cast<const Int4Group*>(start);
            for (int64_t g = 0; g < k / kGroup; g++) {
                const float scale = half_to_float(groups[g].scale[c].bits), minimum = half_to_float(groups[g].minimum[c].bits);
                for (int inner = 0; inner < kGroup; inner++) {
                    const int j = inner / 4;
                    const uint8_t both = groups[g].codes[j % 4][4 * c + inner % 4];
                    out[g * kGroup + inner] = static_cast<float>(j < 4 ? both & 15 : both >> 4) * scale + minimum;
                }
            }
            return;
        }
        case Kind::kInt8: {
            const auto* groups = reinterpret_cast<const Int8Group*>(start);
            for (int64_t i = 0; i < k; i++) {
                const Int8Group& group = groups[i / kGroup];
                const int64_t inner = i % kGroup;
                out[i] = static_cast<float>(group.codes[inner / 4][4 * c + inner % 4]) * half_to_float(group.scale[c].bits);
            }
            return;
        }
    }
}

namespace {

F8 magnitude_of_group(const float* x) {
    return max8(max8(abs8(load8(x)), abs8(load8(x + 8))), max8(abs8(load8(x + 16)), abs8(load8(x + 24))));
}

// Codes of 32 values as whole floats; scales[0] = largest / most, scales[1] = that times the sum of the codes.
void quantize_group(const float* x, float largest, float most, F8* codes, float* scales) {
    const bool some = largest > 1e-30f;  // below, the inverse would overflow; such values are nothing beside any weight
    const F8 inverse = set8(some ? most / largest : 0.0f);
    F8 total = zero8();
    for (int i = 0; i < 4; i++) {
        codes[i] = round8(load8(x + 8 * i) * inverse);
        total = total + codes[i];  // whole numbers below 2^24: exact
    }
    const float sum = sum8(total);
    scales[0] = some ? largest / most : 0.0f;
    scales[1] = scales[0] * sum;
    if (std::isnan(sum)) {  // codes can't say NaN, and beside it largest8 may have missed what is too large for them
        scales[0] = scales[1] = sum;
        for (int i = 0; i < 4; i++) codes[i] = zero8();
    }
}

}  // namespace

void quantize16(const float* x, int64_t width, int16_t* codes, float* scales) {
    for (int64_t g = 0; g < width / kGroup; g++, x += kGroup, codes += kGroup, scales += 2) {
        F8 whole[4];
        quantize_group(x, largest8(magnitude_of_group(x)), 32767.0f, whole, scales);
        store_codes(codes, whole[0], whole[1]);
        store_codes(codes + 16, whole[2], whole[3]);
    }
}

void quantize8(const float* x, int64_t width, int8_t* codes, float* scales, Outlier* outliers) {
    const int64_t groups = width / kGroup;
    // Largest magnitudes of the groups: kept where the scales will be.
    for (int64_t g = 0; g < groups; g++) scales[2 * g] = largest8(magnitude_of_group(x + g * kGroup));
    alignas(32) float rest[kOutliers][kGroup];  // groups with outliers, without them
    int64_t places[kOutliers];
    int changed = 0;
    for (int o = 0; o < kOutliers; o++) {
        int64_t top = 0;
        for (int64_t g = 1; g < groups; g++) top = scales[2 * g] > scales[2 * top] ? g : top;
        int copy = 0;
        while (copy < changed && places[copy] != top) copy++;
        if (copy == changed) {
            places[changed++] = top;
            std::memcpy(rest[copy], x + top * kGroup, sizeof rest[copy]);
        }
        int inner = 0;
        for (int i = 1; i < kGroup; i++) inner = std::fabs(rest[copy][i]) > std::fabs(rest[copy][inner]) ? i : inner;
        const float value = rest[copy][inner];
        outliers[o] = {static_cast<int32_t>(top), static_cast<int16_t>(inner / 4 % 4),
                       static_cast<int16_t>(inner % 4 * 8 + (inner < kGroup / 2 ? 0 : 4)), std::isfinite(value) ? value : NAN};
        rest[copy][inner] = 0.0f;
        scales[2 * top] = largest8(magnitude_of_group(rest[copy]));
    }
    for (int64_t g = 0; g < groups; g++) {
        const float* from = x + g * kGroup;
        for (int copy = 0; copy < changed; copy++) from = places[copy] == g ? rest[copy] : from;
        F8 whole[4];
        quantize_group(from, scales[2 * g], 127.0f, whole, scales + 2 * g);
        store_codes(codes + g * kGroup, whole);
    }
    for (int o = 0; o < kOutliers; o++) scales[2 * outliers[o].group + 1] += outliers[o].value;
}

}  // namespace tokenmill
