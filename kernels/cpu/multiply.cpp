// Matrix products with packed weights: register tiles of R rows by P panels.
//
// A tile size changes how often a weight is loaded, never the operations of a result: each is one chain of sums over
// the inputs (or over groups of 32 whose integer sums are exact), so it has the same bits alone and in any batch.
#include <algorithm>
#include <cstring>

#include "simd.h"
#include "weight.h"

namespace tokenmill {

namespace {

struct Rows {
    const Buffer& x;
    int64_t first;
    int64_t groups;  // of 32 inputs in a row

    const float* values(int r) const { return x.values + (first + r) * x.width; }
    const int16_t* codes() const { return x.codes + first * x.width; }
    const float* scales() const { return x.scales + first * groups * 2; }
};

// --- float32 and bfloat16 weights, float32 activations ------------------------------------------------------------

struct Float32Panel {
    using Element = float;
    static void load(const float* p, F8& low, F8& high) {
        low = load8(p);
        high = load8(p + 8);
    }
};

struct Bfloat16Panel {
    using Element = bf16;
    static void load(const bf16* p, F8& low, F8& high) {
#if TOKENMILL_X86
        const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
        low = {_mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16))};
        high = {_mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xffff0000u))))};
#else
        for (int i = 0; i < 8; i++) {
            low.v[i] = bf16_to_float(p[2 * i]);
            high.v[i] = bf16_to_float(p[2 * i + 1]);
        }
#endif
    }
};

template <class Panel, int R, int P>
void multiply_float(const Weight& weight, const Rows& rows, int64_t panel, float* out, int stride) {
    const typename Panel::Element* w[P];
    for (int p = 0; p < P; p++) w[p] = reinterpret_cast<const typename Panel::Element*>(weight.panel(panel + p));
    const float* x[R];
    for (int r = 0; r < R; r++) x[r] = rows.values(r);
    F8 sums[R][P][2];
    for (auto& row : sums) {
        for (auto& pair : row) pair[0] = pair[1] = zero8();
    }
    for (int64_t i = 0; i < weight.k; i++) {
        for (int p = 0; p < P; p++) {
            F8 low, high;
            Panel::load(w[p] + i * 16, low, high);
            for (int r = 0; r < R; r++) {
                const F8 value = set8(x[r][i]);
                sums[r][p][0] = fma(low, value, sums[r][p][0]);
                sums[r][p][1] = fma(high, value, sums[r][p][1]);
            }
        }
    }
    for (int r = 0; r < R; r++) {
        for (int p = 0; p < P; p++) {
            store8(out + r * stride + p * 16, sums[r][p][0]);
            store8(out + r * stride + p * 16 + 8, sums[r][p][1]);
        }
    }
}

// --- int4 and int8 weights, int16 activations ---------------------------------------------------------------------
//
// Measured on AVX2: int8 activations are up to 1.5 times as fast but cost 0.09 of log-probability on average (SmolLM2, a
// scale for each 32 values); two terms of int8, or codes turned into float32, are slower than int16 for few rows, and no
// faster for many.
//
// The loops over j stay loops: unrolled, compilers move all loads to the front and run out of registers.

// The codes of four inputs of 8 columns (byte i of each column's four: input i) as two vectors of pairs: inputs 0 and 2,
// inputs 1 and 3. `j` counts the fours of a group.
#if TOKENMILL_X86

struct Int4Pairs {
    using Group = Int4Group;
    static constexpr bool kHasMinimum = true;

    static void load(const Group& group, int j, __m256i& even, __m256i& odd) {
        const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(group.codes[j & 3]));
        const __m256i mask = _mm256_set1_epi32(0x000f000f);
        even = _mm256_and_si256(j < 4 ? both : _mm256_srli_epi32(both, 4), mask);
        odd = _mm256_and_si256(_mm256_srli_epi32(both, j < 4 ? 8 : 12), mask);
    }
    static F8 scale(const Group& group) { return halves(group.scale); }
    static F8 minimum(const Group& group) { return halves(group.minimum); }
    static F8 halves(const uint16_t* p) {
        return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
    }
};

struct Int8Pairs {
    using Group = Int8Group;
    static constexpr bool kHasMinimum = false;

    static void load(const Group& group, int j, __m256i& even, __m256i& odd) {
        const __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(group.codes[j]));
        even = _mm256_srai_epi16(_mm256_slli_epi16(codes, 8), 8);
        odd = _mm256_srai_epi16(codes, 8);
    }
    static F8 scale(const Group& group) { return load8(group.scale); }
    static F8 minimum(const Group&) { return zero8(); }
};

inline __m256i broadcast_pair(const int16_t* p) {
    int32_t pair;
    std::memcpy(&pair, p, 4);
    return _mm256_set1_epi32(pair);
}

// sums + a * b of pairs
inline __m256i add_products(__m256i sums, __m256i a, __m256i b) {
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
    return _mm256_dpwssd_epi32(sums, a, b);
#else
    return _mm256_add_epi32(sums, _mm256_madd_epi16(a, b));
#endif
}

template <class Pairs, int R, int P>
inline void add_four(const typename Pairs::Group* const* w, int j, const int16_t* x, int64_t width, __m256i (*sums)[P]) {
    for (int p = 0; p < P; p++) {
        __m256i even, odd;
        Pairs::load(*w[p], j, even, odd);
        for (int r = 0; r < R; r++) {
            sums[r][p] = add_products(sums[r][p], even, broadcast_pair(x + r * width + 4 * j));
            sums[r][p] = add_products(sums[r][p], odd, broadcast_pair(x + r * width + 4 * j + 2));
        }
    }
}

// Sums of a group fit 32 bits: 32 * 128 * 32767 is 1.3e8.
template <class Pairs, int R, int P>
void multiply_integers(const Weight& weight, const Rows& rows, int64_t panel, float* out, int stride) {
    using Group = typename Pairs::Group;
    const Group* w[P];
    for (int p = 0; p < P; p++) w[p] = reinterpret_cast<const Group*>(weight.panel(panel + p));
    const int16_t* codes = rows.codes();
    const float* scales = rows.scales();
    const int64_t width = rows.groups * kGroup;
    F8 totals[R][P];
    for (auto& row : totals) {
        for (auto& total : row) total = zero8();
    }
    for (int64_t g = 0; g < rows.groups; g++) {
        __m256i sums[R][P];
        for (auto& row : sums) {
            for (auto& sum : row) sum = _mm256_setzero_si256();
        }
#pragma GCC unroll 1
        for (int j = 0; j < 4; j++) add_four<Pairs, R, P>(w, j, codes + g * kGroup, width, sums);
#pragma GCC unroll 1
        for (int j = 4; j < 8; j++) add_four<Pairs, R, P>(w, j, codes + g * kGroup, width, sums);
        for (int p = 0; p < P; p++) {
            const F8 scale = Pairs::scale(*w[p]), minimum = Pairs::minimum(*w[p]);
            for (int r = 0; r < R; r++) {
                const float* x = scales + 2 * (r * rows.groups + g);
                const F8 whole = {_mm256_cvtepi32_ps(sums[r][p])};
                totals[r][p] = fma(whole, scale * set8(x[0]), totals[r][p]);
                if constexpr (Pairs::kHasMinimum) totals[r][p] = fma(minimum, set8(x[1]), totals[r][p]);
            }
            w[p]++;
        }
    }
    for (int r = 0; r < R; r++) {
        for (int p = 0; p < P; p++) store8(out + r * stride + p * 8, totals[r][p]);
    }
}

#else

struct Int4Pairs {
    using Group = Int4Group;
    static int code(const Group& group, int c, int input) {
        const int j = input / 4;
        const uint8_t both = group.codes[j % 4][4 * c + input % 4];
        return j < 4 ? both & 15 : both >> 4;
    }
    static float scale(const Group& group, int c) { return half_to_float(group.scale[c]); }
    static float minimum(const Group& group, int c) { return half_to_float(group.minimum[c]); }
};

struct Int8Pairs {
    using Group = Int8Group;
    static int code(const Group& group, int c, int input) { return group.codes[input / 4][4 * c + input % 4]; }
    static float scale(const Group& group, int c) { return group.scale[c]; }
    static float minimum(const Group&, int) { return 0.0f; }
};

template <class Pairs, int R, int P>
void multiply_integers(const Weight& weight, const Rows& rows, int64_t panel, float* out, int stride) {
    constexpr int order[4] = {0, 2, 1, 3};
    for (int p = 0; p < P; p++) {
        const auto* w = reinterpret_cast<const typename Pairs::Group*>(weight.panel(panel + p));
        for (int r = 0; r < R; r++) {
            for (int c = 0; c < 8; c++) {
                float total = 0.0f;
                for (int64_t g = 0; g < rows.groups; g++) {
                    const int16_t* x = rows.codes() + (r * rows.groups + g) * kGroup;
                    const float* scales = rows.scales() + 2 * (r * rows.groups + g);
                    int32_t sum = 0;
                    for (int i = 0; i < kGroup; i++) sum += Pairs::code(w[g], c, i / 4 * 4 + order[i % 4]) * x[i];
                    total = static_cast<float>(sum) * (Pairs::scale(w[g], c) * scales[0]) + total;
                    total = Pairs::minimum(w[g], c) * scales[1] + total;
                }
                out[r * stride + p * 8 + c] = total;
            }
        }
    }
}

#endif

// --- tiles --------------------------------------------------------------------------------------------------------

using Kernel = void (*)(const Weight&, const Rows&, int64_t panel, float* out, int stride);

// Register tiles for 1, 2, ... rows: `wide` covers `panels` panels at once, `narrow` one.
struct Kernels {
    int rows;
    int panels;
    Kernel wide;
    Kernel narrow;
};

// By the number of rows, from most to fewest; a tile takes the first that fits.
template <class Panel>
const Kernels* float_kernels() {
    static constexpr Kernels table[] = {
        {6, 1, multiply_float<Panel, 6, 1>, multiply_float<Panel, 6, 1>},
        {4, 1, multiply_float<Panel, 4, 1>, multiply_float<Panel, 4, 1>},
        {3, 2, multiply_float<Panel, 3, 2>, multiply_float<Panel, 3, 1>},
        {2, 2, multiply_float<Panel, 2, 2>, multiply_float<Panel, 2, 1>},
        {1, 2, multiply_float<Panel, 1, 2>, multiply_float<Panel, 1, 1>},
    };
    return table;
}

template <class Pairs>
const Kernels* integer_kernels() {
    static constexpr Kernels table[] = {
        {6, 1, multiply_integers<Pairs, 6, 1>, multiply_integers<Pairs, 6, 1>},
        {4, 1, multiply_integers<Pairs, 4, 1>, multiply_integers<Pairs, 4, 1>},
        {3, 1, multiply_integers<Pairs, 3, 1>, multiply_integers<Pairs, 3, 1>},
        {2, 2, multiply_integers<Pairs, 2, 2>, multiply_integers<Pairs, 2, 1>},
        {1, 4, multiply_integers<Pairs, 1, 4>, multiply_integers<Pairs, 1, 1>},
    };
    return table;
}

const Kernels* kernels_of(Kind kind) {
    switch (kind) {
        case Kind::kFloat32: return float_kernels<Float32Panel>();
        case Kind::kBfloat16: return float_kernels<Bfloat16Panel>();
        case Kind::kInt4: return integer_kernels<Int4Pairs>();
        case Kind::kInt8: return integer_kernels<Int8Pairs>();
    }
    return nullptr;
}

}  // namespace

void multiply_tile(const Weight& weight, const Buffer& x, int64_t row0, int rows, int64_t col0, int cols, float* tile,
                   int stride) {
    const int width = panel_width(weight.kind);
    const int64_t first = col0 / width, last = std::min((col0 + cols + width - 1) / width, weight.panels());
    const int64_t groups = x.width / kGroup;
    const Kernels* all = kernels_of(weight.kind);
    for (int64_t panel = first; panel < last;) {
        // Panels outside, rows inside: the panel stays in the first-level cache.
        const int64_t left = last - panel;
        int64_t step = all->panels;
        int r = 0;
        while (r < rows) {
            const Kernels* fit = all;
            while (fit->rows > rows - r) fit++;
            if (r == 0) step = left >= fit->panels ? fit->panels : 1;
            const Rows some{x, row0 + r, groups};
            float* out = tile + static_cast<int64_t>(r) * stride + (panel - first) * width;
            if (step == fit->panels) {
                fit->wide(weight, some, panel, out, stride);
            } else {
                for (int64_t p = 0; p < step; p++) fit->narrow(weight, some, panel + p, out + p * width, stride);
            }
            r += fit->rows;
        }
        panel += step;
    }
}

}  // namespace tokenmill
