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
    const int16_t* codes16() const { return x.codes16 + first * x.width; }
    const float* scales16() const { return x.scales16 + first * groups * 2; }
    const int8_t* codes8() const { return x.codes8 + first * x.width; }
    const float* scales8() const { return x.scales8 + first * groups * 2; }
    const Outlier* outliers(int r) const { return x.outliers + (first + r) * kOutliers; }
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
void multiply_float(const Weight& weight, const Rows& rows, int64_t panel, float* out, int64_t stride) {
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

// --- int8 weights, int16 activations ------------------------------------------------------------------------------
//
// The loops over j stay loops: unrolled, compilers move all loads to the front and run out of registers.

#if TOKENMILL_X86

inline __m256i load_codes(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }

// How many groups ahead memory is asked for: those of the next panels, or further where little is done with each.
// Measured: the hardware alone reads int4 weights at half the speed that this gets.
inline int64_t groups_ahead(const Weight& weight, const Rows& rows, int r, int p) {
    constexpr int64_t kBytes = 24 << 10;
    const int64_t panels = r > 1 ? p : std::max<int64_t>(p, kBytes / weight.panel_bytes());
    return rows.groups * panels;
}

inline __m256i broadcast4(const void* p) {
    int32_t bytes;
    std::memcpy(&bytes, p, 4);
    return _mm256_set1_epi32(bytes);
}

// sums + a * b of pairs
inline __m256i add_products(__m256i sums, __m256i a, __m256i b) {
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
    return _mm256_dpwssd_epi32(sums, a, b);
#else
    sums = _mm256_add_epi32(sums, _mm256_madd_epi16(a, b));
    asm("" : "+x"(sums));
    return sums;
#endif
}

// Sums of a group fit 32 bits: 32 * 128 * 32767 is 1.3e8.
template <int R, int P>
void multiply_int8(const Weight& weight, const Rows& rows, int64_t panel, float* out, int64_t stride) {
    const Int8Group* w[P];
    for (int p = 0; p < P; p++) w[p] = reinterpret_cast<const Int8Group*>(weight.panel(panel + p));
    const int16_t* codes = rows.codes16();
    const int64_t ahead = groups_ahead(weight, rows, R, P);
    const float* scales = rows.scales16();
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
        for (int p = 0; p < P; p++) prefetch(&w[p][g] + ahead, sizeof(Int8Group));
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++) {
            const int16_t* x = codes + g * kGroup + 4 * j;
            // Of each column's four codes: first those of inputs 0 and 2, then those of inputs 1 and 3.
            __m256i half[P];
            for (int p = 0; p < P; p++) half[p] = _mm256_srai_epi16(_mm256_slli_epi16(load_codes(w[p][g].codes[j]), 8), 8);
            for (int r = 0; r < R; r++) {
                const __m256i two = broadcast4(x + r * width);
                for (int p = 0; p < P; p++) sums[r][p] = add_products(sums[r][p], half[p], two);
                asm volatile("" : : : "memory");
            }
            for (int p = 0; p < P; p++) half[p] = _mm256_srai_epi16(load_codes(w[p][g].codes[j]), 8);
            for (int r = 0; r < R; r++) {
                const __m256i two = broadcast4(x + r * width + 2);
                for (int p = 0; p < P; p++) sums[r][p] = add_products(sums[r][p], half[p], two);
                asm volatile("" : : : "memory");
            }
        }
        for (int p = 0; p < P; p++) {
            const F8 scale = load8(w[p][g].scale);
            for (int r = 0; r < R; r++) {
                const F8 whole = {_mm256_cvtepi32_ps(sums[r][p])};
                totals[r][p] = fma(whole, scale * set8(scales[2 * (r * rows.groups + g)]), totals[r][p]);
            }
        }
    }
    for (int r = 0; r < R; r++) {
        for (int p = 0; p < P; p++) store8(out + r * stride + p * 8, totals[r][p]);
    }
}

#else

template <int R, int P>
void multiply_int8(const Weight& weight, const Rows& rows, int64_t panel, float* out, int64_t stride) {
    constexpr int order[4] = {0, 2, 1, 3};
    for (int p = 0; p < P; p++) {
        const auto* w = reinterpret_cast<const Int8Group*>(weight.panel(panel + p));
        for (int r = 0; r < R; r++) {
            for (int c = 0; c < 8; c++) {
                float total = 0.0f;
                for (int64_t g = 0; g < rows.groups; g++) {
                    const int16_t* x = rows.codes16() + (r * rows.groups + g) * kGroup;
                    int32_t sum = 0;
                    for (int i = 0; i < kGroup; i++) sum += w[g].codes[i / 4][4 * c + i % 4] * x[i / 4 * 4 + order[i % 4]];
                    const float scale = half_to_float(w[g].scale[c].bits) * rows.scales16()[2 * (r * rows.groups + g)];
                    total = static_cast<float>(sum) * scale + total;
                }
                out[r * stride + p * 8 + c] = total;
            }
        }
    }
}

#endif

// --- int4 weights, int8 activations -------------------------------------------------------------------------------
//
// Products of pairs are added up in 16 bits, 32 inputs at a time: 8 * 2 * 15 * 127 is 30,480. That halves the work of
// 16-bit activations. What it would cost in exactness is mostly due to single large values, which stretch the scale of
// all the others in their group: the largest of a row are therefore multiplied as float32 instead. (Only by code and scale:
// the minimum of a group meets the sum of all its inputs, these included.)

#if TOKENMILL_X86

// A group's sums of products: 16 bits, or 32 bits where one instruction adds up four.
struct Int4Sums {
    __m256i v = _mm256_setzero_si256();

    void add(__m256i codes, __m256i x) {
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
        v = _mm256_dpbusd_epi32(v, codes, x);
#else
        v = _mm256_add_epi16(v, _mm256_maddubs_epi16(codes, x));
        // Compilers would add up products first, for which there are no registers left.
        asm("" : "+x"(v));
#endif
    }
    F8 whole() const {
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
        return {_mm256_cvtepi32_ps(v)};
#else
        return {_mm256_cvtepi32_ps(_mm256_madd_epi16(v, _mm256_set1_epi16(1)))};
#endif
    }
};

// The products of four inputs of each column.
template <int R, int P>
inline void add_four(const __m256i* codes, const int8_t* x, int64_t width, Int4Sums (*sums)[P]) {
    for (int r = 0; r < R; r++) {
        const __m256i inputs = broadcast4(x + r * width);
        for (int p = 0; p < P; p++) sums[r][p].add(codes[p], inputs);
        asm volatile("" : : : "memory");
    }
}

// Column values of one input, without the minimum of their groups.
inline F8 int4_column(const Int4Group& group, int row, __m128i shift) {
    const __m256i codes = _mm256_srl_epi32(load_codes(group.codes[row]), shift);
    const F8 whole = {_mm256_cvtepi32_ps(_mm256_and_si256(codes, _mm256_set1_epi32(15)))};
    return whole * load8(group.scale);
}

template <int R, int P>
void multiply_int4(const Weight& weight, const Rows& rows, int64_t panel, float* out, int64_t stride) {
    const Int4Group* w[P];
    for (int p = 0; p < P; p++) w[p] = reinterpret_cast<const Int4Group*>(weight.panel(panel + p));
    const int8_t* codes = rows.codes8();
    const float* scales = rows.scales8();
    const int64_t ahead = groups_ahead(weight, rows, R, P);
    const int64_t width = rows.groups * kGroup;
    const __m256i low = _mm256_set1_epi8(15);
    F8 totals[R][P];
    for (auto& row : totals) {
        for (auto& total : row) total = zero8();
    }
    for (int64_t g = 0; g < rows.groups; g++) {
        Int4Sums sums[R][P];
        for (int p = 0; p < P; p++) prefetch(&w[p][g] + ahead, sizeof(Int4Group));
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            const int8_t* x = codes + g * kGroup + 4 * j;
            __m256i four[P];
            for (int p = 0; p < P; p++) four[p] = _mm256_and_si256(load_codes(w[p][g].codes[j]), low);
            add_four<R, P>(four, x, width, sums);
            for (int p = 0; p < P; p++) {
                four[p] = _mm256_and_si256(_mm256_srli_epi16(load_codes(w[p][g].codes[j]), 4), low);
            }
            add_four<R, P>(four, x + 16, width, sums);
        }
        F8 scale[P], minimum[P];
        for (int p = 0; p < P; p++) {
            scale[p] = load8(w[p][g].scale);
            minimum[p] = load8(w[p][g].minimum);
        }
        for (int r = 0; r < R; r++) {
            const float* x = scales + 2 * (r * rows.groups + g);
            for (int p = 0; p < P; p++) {
                totals[r][p] = fma(sums[r][p].whole(), scale[p] * set8(x[0]), totals[r][p]);
                totals[r][p] = fma(minimum[p], set8(x[1]), totals[r][p]);
            }
        }
    }
    for (int r = 0; r < R; r++) {
        for (int o = 0; o < kOutliers; o++) {
            const Outlier& outlier = rows.outliers(r)[o];
            const __m128i shift = _mm_cvtsi32_si128(outlier.shift);
            for (int p = 0; p < P; p++) {
                const F8 column = int4_column(w[p][outlier.group], outlier.row, shift);
                totals[r][p] = fma(column, set8(outlier.value), totals[r][p]);
            }
        }
        for (int p = 0; p < P; p++) store8(out + r * stride + p * 8, totals[r][p]);
    }
}

#else

inline int int4_code(const Int4Group& group, int c, int input) {
    const int j = input / 4;
    const uint8_t both = group.codes[j % 4][4 * c + input % 4];
    return j < 4 ? both & 15 : both >> 4;
}

template <int R, int P>
void multiply_int4(const Weight& weight, const Rows& rows, int64_t panel, float* out, int64_t stride) {
    for (int p = 0; p < P; p++) {
        const auto* w = reinterpret_cast<const Int4Group*>(weight.panel(panel + p));
        for (int r = 0; r < R; r++) {
            for (int c = 0; c < 8; c++) {
                float total = 0.0f;
                for (int64_t g = 0; g < rows.groups; g++) {
                    const int8_t* x = rows.codes8() + (r * rows.groups + g) * kGroup;
                    const float* scales = rows.scales8() + 2 * (r * rows.groups + g);
                    int32_t sum = 0;
                    for (int i = 0; i < kGroup; i++) sum += int4_code(w[g], c, i) * x[i];
                    total = static_cast<float>(sum) * (half_to_float(w[g].scale[c].bits) * scales[0]) + total;
                    total = half_to_float(w[g].minimum[c].bits) * scales[1] + total;
                }
                for (int o = 0; o < kOutliers; o++) {
                    const Outlier& outlier = rows.outliers(r)[o];
                    const Int4Group& group = w[outlier.group];
                    const uint8_t both = group.codes[outlier.row][4 * c + outlier.shift / 8];
                    const auto code = static_cast<float>(both >> outlier.shift % 8 & 15);
                    total = code * half_to_float(group.scale[c].bits) * outlier.value + total;
                }
                out[r * stride + p * 8 + c] = total;
            }
        }
    }
}

#endif

// --- tiles --------------------------------------------------------------------------------------------------------

using Kernel = void (*)(const Weight&, const Rows&, int64_t panel, float* out, int64_t stride);

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

const Kernels* int8_kernels() {
    static constexpr Kernels table[] = {
        {4, 2, multiply_int8<4, 2>, multiply_int8<4, 1>},
        {3, 2, multiply_int8<3, 2>, multiply_int8<3, 1>},
        {2, 2, multiply_int8<2, 2>, multiply_int8<2, 1>},
        {1, 4, multiply_int8<1, 4>, multiply_int8<1, 1>},
        {1, 2, multiply_int8<1, 2>, multiply_int8<1, 1>},
    };
    return table;
}

const Kernels* int4_kernels() {
    static constexpr Kernels table[] = {
        {4, 2, multiply_int4<4, 2>, multiply_int4<4, 1>},
        {3, 2, multiply_int4<3, 2>, multiply_int4<3, 1>},
        {2, 2, multiply_int4<2, 2>, multiply_int4<2, 1>},
        {1, 4, multiply_int4<1, 4>, multiply_int4<1, 1>},
        {1, 2, multiply_int4<1, 2>, multiply_int4<1, 1>},
    };
    return table;
}

const Kernels* kernels_of(Kind kind) {
    switch (kind) {
        case Kind::kFloat32: return float_kernels<Float32Panel>();
        case Kind::kBfloat16: return float_kernels<Bfloat16Panel>();
        case Kind::kInt4: return int4_kernels();
        case Kind::kInt8: return int8_kernels();
    }
    return nullptr;
}

}  // namespace

void multiply_tile(const Weight& weight, const Buffer& x, int64_t row0, int rows, int64_t col0, int cols, float* tile,
                   int64_t stride) {
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
            else if (fit->rows == 1 && fit->panels != step && fit->panels > 2) fit++;
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
