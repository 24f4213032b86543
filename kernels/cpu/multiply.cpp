// Matrix products with packed weights: register tiles of R rows by P panels.
//
// A tile size changes how often a weight is loaded, never the operations of a result: each is one chain of sums over
// the inputs (or over groups of 32 whose integer sums are exact), so it has the same bits alone and in any batch.
#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "simd.h"
#include "weight.h"

namespace tokenmill {

namespace {

struct Rows {
    const Buffer& x;
    int64_t first;
    int64_t groups;  // of 32 inputs in a row

    const float* values(int r) const { return x.values + (first + r) * x.width; }
    const int8_t* codes(int r) const { return x.codes + (first + r) * x.width; }
    const float* scales(int r) const { return x.scales + (first + r) * groups * 2; }
};

// --- float32 and bfloat16 weights, float32 activations ------------------------------------------------------------

struct Float32Panel {
    static constexpr int kWidth = 16;
    using Element = float;
    static void load(const float* p, F8& low, F8& high) {
        low = load8(p);
        high = load8(p + 8);
    }
};

struct Bfloat16Panel {
    static constexpr int kWidth = 16;
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

// w: P panels of [inputs][16 columns].
template <class Panel, int R, int P>
void multiply_panels(const typename Panel::Element* const* w, int64_t inputs, const Rows& rows, float* out, int stride) {
    const float* x[R];
    for (int r = 0; r < R; r++) x[r] = rows.values(r);
    F8 sums[R][P][2];
    for (auto& row : sums) {
        for (auto& pair : row) pair[0] = pair[1] = zero8();
    }
    for (int64_t i = 0; i < inputs; i++) {
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

template <class Panel, int R, int P>
void multiply_float(const Weight& weight, const Rows& rows, int64_t panel, float* out, int stride) {
    const typename Panel::Element* w[P];
    for (int p = 0; p < P; p++) w[p] = reinterpret_cast<const typename Panel::Element*>(weight.panel(panel + p));
    multiply_panels<Panel, R, P>(w, weight.k, rows, out, stride);
}

// --- int4 and int8 weights, float32 activations -------------------------------------------------------------------
//
// What a code stands for is computed in float32 and multiplied as a float32 weight is: for few rows on the way, for many
// once for all of them. Either way the same operations: code * scale + minimum, then one chain of sums over the inputs.

// The codes of four inputs (byte 0 to 3 of each column) as floats, and what they stand for.
struct Int4Codes {
    using Group = Int4Group;
    F8 scale, minimum;

    explicit Int4Codes(const Group& group) : scale(halves(group.scale)), minimum(halves(group.minimum)) {}

    template <int Input>
    F8 value(const Group& group, int j) const {
#if TOKENMILL_X86
        const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(group.codes[j & 3]));
        const __m256i shifted = j < 4 ? _mm256_srli_epi32(both, 8 * Input) : _mm256_srli_epi32(both, 8 * Input + 4);
        const F8 code = {_mm256_cvtepi32_ps(_mm256_and_si256(shifted, _mm256_set1_epi32(15)))};
#else
        const F8 code = each([&](int c) {
            const uint8_t both = group.codes[j & 3][4 * c + Input];
            return static_cast<float>(j < 4 ? both & 15 : both >> 4);
        });
#endif
        return fma(code, scale, minimum);
    }

    static F8 halves(const uint16_t* p) {
#if TOKENMILL_X86
        return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
#else
        return each([&](int c) { return half_to_float(p[c]); });
#endif
    }
};

struct Int8Codes {
    using Group = Int8Group;
    F8 scale;

    explicit Int8Codes(const Group& group) : scale(load8(group.scale)) {}

    template <int Input>
    F8 value(const Group& group, int j) const {
#if TOKENMILL_X86
        const __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(group.codes[j]));
        const __m256i shifted = _mm256_srai_epi32(_mm256_slli_epi32(codes, 24 - 8 * Input), 24);
        const F8 code = {_mm256_cvtepi32_ps(shifted)};
#else
        const F8 code = each([&](int c) { return static_cast<float>(group.codes[j][4 * c + Input]); });
#endif
        return code * scale;
    }
};

template <class Codes, int Input, int R, int P>
inline void add_input(const typename Codes::Group* const* w, const Codes* codes, int j, const float* const* x, F8 (*sums)[P]) {
    for (int p = 0; p < P; p++) {
        const F8 value = codes[p].template value<Input>(*w[p], j);
        for (int r = 0; r < R; r++) sums[r][p] = fma(value, set8(x[r][4 * j + Input]), sums[r][p]);
    }
}

template <class Codes, int R, int P>
void multiply_dequantized(const Weight& weight, const Rows& rows, int64_t panel, float* out, int stride) {
    using Group = typename Codes::Group;
    const Group* w[P];
    for (int p = 0; p < P; p++) w[p] = reinterpret_cast<const Group*>(weight.panel(panel + p));
    const float* x[R];
    for (int r = 0; r < R; r++) x[r] = rows.values(r);
    F8 sums[R][P];
    for (auto& row : sums) {
        for (auto& sum : row) sum = zero8();
    }
    for (int64_t g = 0; g < rows.groups; g++) {
        const auto codes = [&] {
            if constexpr (P == 1) return std::array<Codes, 1>{Codes(*w[0])};
            else if constexpr (P == 2) return std::array<Codes, 2>{Codes(*w[0]), Codes(*w[1])};
            else return std::array<Codes, 4>{Codes(*w[0]), Codes(*w[1]), Codes(*w[2]), Codes(*w[3])};
        }();
#pragma GCC unroll 1
        for (int j = 0; j < 8; j++) {
            add_input<Codes, 0, R, P>(w, codes.data(), j, x, sums);
            add_input<Codes, 1, R, P>(w, codes.data(), j, x, sums);
            add_input<Codes, 2, R, P>(w, codes.data(), j, x, sums);
            add_input<Codes, 3, R, P>(w, codes.data(), j, x, sums);
        }
        for (int p = 0; p < P; p++) w[p]++;
        for (int r = 0; r < R; r++) x[r] += kGroup;
    }
    for (int r = 0; r < R; r++) {
        for (int p = 0; p < P; p++) store8(out + r * stride + p * 8, sums[r][p]);
    }
}

// Two panels (or one, and zeros) as a float32 panel of 16 columns.
template <class Codes>
void dequantize_pair(const Weight& weight, int64_t panel, float* out) {
    for (int64_t p = 0; p < 2; p++) {
        if (panel + p == weight.panels()) {
            for (int64_t i = 0; i < weight.k; i++) store8(out + i * 16 + 8, zero8());
            return;
        }
        const auto* w = reinterpret_cast<const typename Codes::Group*>(weight.panel(panel + p));
        for (int64_t g = 0; g < weight.k / kGroup; g++) {
            const Codes codes(w[g]);
            float* to = out + g * kGroup * 16 + p * 8;
            for (int j = 0; j < 8; j++, to += 4 * 16) {
                store8(to, codes.template value<0>(w[g], j));
                store8(to + 16, codes.template value<1>(w[g], j));
                store8(to + 32, codes.template value<2>(w[g], j));
                store8(to + 48, codes.template value<3>(w[g], j));
            }
        }
    }
}

// --- int4 and int8 weights, int8 activations ----------------------------------------------------------------------

#if TOKENMILL_X86

inline __m256i broadcast4(const int8_t* p) {
    int32_t four;
    std::memcpy(&four, p, 4);
    return _mm256_set1_epi32(four);
}

#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
constexpr bool kDot4 = true;
inline __m256i dot4(__m256i sums, __m256i unsigned_codes, __m256i codes) {
    return _mm256_dpbusd_epi32(sums, unsigned_codes, codes);
}
#else
constexpr bool kDot4 = false;
inline __m256i dot4(__m256i sums, __m256i, __m256i) { return sums; }
#endif

// The loops over j stay loops: unrolled, compilers move all loads to the front and run out of registers.

template <int R, int P>
void multiply_int4(const Weight& weight, const Rows& rows, int64_t panel, float* out, int stride) {
    const Int4Group* w[P];
    for (int p = 0; p < P; p++) w[p] = reinterpret_cast<const Int4Group*>(weight.panel(panel + p));
    const int8_t* codes = rows.codes(0);
    const float* scales = rows.scales(0);
    const int64_t width = rows.groups * kGroup;
    __m256 totals[R][P];
    for (auto& row : totals) {
        for (auto& total : row) total = _mm256_setzero_ps();
    }
    const __m256i low_bits = _mm256_set1_epi8(15);
    for (int64_t g = 0; g < rows.groups; g++) {
        // Without dot4: sums of pairs in 16 bits. 8 times 2 * 15 * 127 is 30,480, which fits.
        __m256i sums[R][P];
        for (auto& row : sums) {
            for (auto& sum : row) sum = _mm256_setzero_si256();
        }
#pragma GCC unroll 1
        for (int j = 0; j < 4; j++) {
            const int8_t* x = codes + g * kGroup + 4 * j;
            for (int p = 0; p < P; p++) {
                const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w[p][g].codes[j]));
                const __m256i low = _mm256_and_si256(both, low_bits);
                const __m256i high = _mm256_and_si256(_mm256_srli_epi16(both, 4), low_bits);
                for (int r = 0; r < R; r++) {
                    const __m256i first = broadcast4(x + r * width), second = broadcast4(x + r * width + 16);
                    if constexpr (kDot4) {
                        sums[r][p] = dot4(dot4(sums[r][p], low, first), high, second);
                    } else {
                        sums[r][p] = _mm256_add_epi16(sums[r][p], _mm256_maddubs_epi16(low, first));
                        sums[r][p] = _mm256_add_epi16(sums[r][p], _mm256_maddubs_epi16(high, second));
                    }
                }
            }
        }
        for (int p = 0; p < P; p++) {
            const auto* halves = reinterpret_cast<const __m128i*>(w[p][g].scale);
            const __m256 scale = _mm256_cvtph_ps(_mm_loadu_si128(halves));
            const __m256 minimum = _mm256_cvtph_ps(_mm_loadu_si128(halves + 1));
            for (int r = 0; r < R; r++) {
                __m256i whole = sums[r][p];
                if constexpr (!kDot4) whole = _mm256_madd_epi16(whole, _mm256_set1_epi16(1));
                const float* x = scales + 2 * (r * rows.groups + g);
                const __m256 both = _mm256_mul_ps(scale, _mm256_set1_ps(x[0]));
                totals[r][p] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(whole), both, totals[r][p]);
                totals[r][p] = _mm256_fmadd_ps(minimum, _mm256_set1_ps(x[1]), totals[r][p]);
            }
        }
    }
    for (int r = 0; r < R; r++) {
        for (int p = 0; p < P; p++) _mm256_storeu_ps(out + r * stride + p * 8, totals[r][p]);
    }
}

// A group of two int4 panels with a byte a code, for many rows: they share the work of taking it apart.
struct Expanded {
    uint8_t codes[8][2][32];
    float scale[2][8];
    float minimum[2][8];
};

void expand(const Weight& weight, int64_t panel, Expanded* to) {
    const __m256i low_bits = _mm256_set1_epi8(15);
    for (int p = 0; p < 2; p++) {
        const auto* from = reinterpret_cast<const Int4Group*>(weight.panel(panel + p));
        for (int64_t g = 0; g < weight.k / kGroup; g++) {
            for (int j = 0; j < 4; j++) {
                const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from[g].codes[j]));
                const __m256i high = _mm256_and_si256(_mm256_srli_epi16(both, 4), low_bits);
                _mm256_storeu_si256(reinterpret_cast<__m256i*>(to[g].codes[j][p]), _mm256_and_si256(both, low_bits));
                _mm256_storeu_si256(reinterpret_cast<__m256i*>(to[g].codes[j + 4][p]), high);
            }
            const auto* halves = reinterpret_cast<const __m128i*>(from[g].scale);
            _mm256_storeu_ps(to[g].scale[p], _mm256_cvtph_ps(_mm_loadu_si128(halves)));
            _mm256_storeu_ps(to[g].minimum[p], _mm256_cvtph_ps(_mm_loadu_si128(halves + 1)));
        }
    }
}

// The operations of multiply_int4, in the same order. Two panels share each load of four inputs, as there are fewer
// loads than products in a cycle; their totals need more registers than there are, and wait in memory for each group.
template <int R>
void multiply_expanded(const Expanded* w, const Rows& rows, float* out, int stride) {
    const int8_t* codes = rows.codes(0);
    const float* scales = rows.scales(0);
    const int64_t width = rows.groups * kGroup;
    __m256 totals[R][2];
    for (auto& row : totals) row[0] = row[1] = _mm256_setzero_ps();
    for (int64_t g = 0; g < rows.groups; g++) {
        __m256i sums[R][2];
        for (auto& row : sums) row[0] = row[1] = _mm256_setzero_si256();
#pragma GCC unroll 1
        for (int j = 0; j < 8; j++) {
            const int8_t* x = codes + g * kGroup + 4 * j;
            const __m256i first = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w[g].codes[j][0]));
            const __m256i second = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w[g].codes[j][1]));
            for (int r = 0; r < R; r++) {
                const __m256i four = broadcast4(x + r * width);
                if constexpr (kDot4) {
                    sums[r][0] = dot4(sums[r][0], first, four);
                    sums[r][1] = dot4(sums[r][1], second, four);
                } else {
                    sums[r][0] = _mm256_add_epi16(sums[r][0], _mm256_maddubs_epi16(first, four));
                    sums[r][1] = _mm256_add_epi16(sums[r][1], _mm256_maddubs_epi16(second, four));
                }
            }
        }
        for (int r = 0; r < R; r++) {
            const float* x = scales + 2 * (r * rows.groups + g);
            const __m256 scale = _mm256_set1_ps(x[0]), sum = _mm256_set1_ps(x[1]);
            for (int p = 0; p < 2; p++) {
                if constexpr (!kDot4) sums[r][p] = _mm256_madd_epi16(sums[r][p], _mm256_set1_epi16(1));
                const __m256 both = _mm256_mul_ps(_mm256_loadu_ps(w[g].scale[p]), scale);
                totals[r][p] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums[r][p]), both, totals[r][p]);
                totals[r][p] = _mm256_fmadd_ps(_mm256_loadu_ps(w[g].minimum[p]), sum, totals[r][p]);
            }
        }
    }
    for (int r = 0; r < R; r++) {
        for (int p = 0; p < 2; p++) _mm256_storeu_ps(out + r * stride + p * 8, totals[r][p]);
    }
}

template <int R, int P>
void multiply_int8(const Weight& weight, const Rows& rows, int64_t panel, float* out, int stride) {
    const Int8Group* w[P];
    for (int p = 0; p < P; p++) w[p] = reinterpret_cast<const Int8Group*>(weight.panel(panel + p));
    const int8_t* codes = rows.codes(0);
    const float* scales = rows.scales(0);
    const int64_t width = rows.groups * kGroup;
    __m256 totals[R][P];
    for (auto& row : totals) {
        for (auto& total : row) total = _mm256_setzero_ps();
    }
    for (int64_t g = 0; g < rows.groups; g++) {
        __m256i sums[R][P];
        for (auto& row : sums) {
            for (auto& sum : row) sum = _mm256_setzero_si256();
        }
#pragma GCC unroll 1
        for (int j = 0; j < 8; j++) {
            const int8_t* x = codes + g * kGroup + 4 * j;
            for (int p = 0; p < P; p++) {
                const __m256i factors = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w[p][g].codes[j]));
                const __m256i magnitudes = _mm256_abs_epi8(factors);
                for (int r = 0; r < R; r++) {
                    // The instruction wants one factor without sign: |w|, which may be 128, times x with the sign of w.
                    const __m256i signed_x = _mm256_sign_epi8(broadcast4(x + r * width), factors);
                    if constexpr (kDot4) {
                        sums[r][p] = dot4(sums[r][p], magnitudes, signed_x);
                    } else {
                        const __m256i pairs = _mm256_maddubs_epi16(magnitudes, signed_x);
                        sums[r][p] = _mm256_add_epi32(sums[r][p], _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
                    }
                }
            }
        }
        for (int p = 0; p < P; p++) {
            const __m256 scale = _mm256_loadu_ps(w[p][g].scale);
            for (int r = 0; r < R; r++) {
                const __m256 both = _mm256_mul_ps(scale, _mm256_set1_ps(scales[2 * (r * rows.groups + g)]));
                totals[r][p] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums[r][p]), both, totals[r][p]);
            }
        }
    }
    for (int r = 0; r < R; r++) {
        for (int p = 0; p < P; p++) _mm256_storeu_ps(out + r * stride + p * 8, totals[r][p]);
    }
}

#else

template <int R, int P>
void multiply_int4(const Weight& weight, const Rows& rows, int64_t panel, float* out, int stride) {
    for (int p = 0; p < P; p++) {
        const auto* w = reinterpret_cast<const Int4Group*>(weight.panel(panel + p));
        for (int r = 0; r < R; r++) {
            for (int c = 0; c < 8; c++) out[r * stride + p * 8 + c] = 0.0f;
        }
        for (int64_t g = 0; g < rows.groups; g++) {
            for (int c = 0; c < 8; c++) {
                const float scale = half_to_float(w[g].scale[c]), minimum = half_to_float(w[g].minimum[c]);
                for (int r = 0; r < R; r++) {
                    const int8_t* x = rows.codes(r) + g * kGroup;
                    int32_t sum = 0;
                    for (int j = 0; j < 4; j++) {
                        for (int i = 0; i < 4; i++) {
                            const uint8_t both = w[g].codes[j][4 * c + i];
                            sum += (both & 15) * x[4 * j + i] + (both >> 4) * x[4 * (j + 4) + i];
                        }
                    }
                    float& total = out[r * stride + p * 8 + c];
                    total = static_cast<float>(sum) * (scale * rows.scales(r)[2 * g]) + total;
                    total = minimum * rows.scales(r)[2 * g + 1] + total;
                }
            }
        }
    }
}

template <int R, int P>
void multiply_int8(const Weight& weight, const Rows& rows, int64_t panel, float* out, int stride) {
    for (int p = 0; p < P; p++) {
        const auto* w = reinterpret_cast<const Int8Group*>(weight.panel(panel + p));
        for (int r = 0; r < R; r++) {
            for (int c = 0; c < 8; c++) out[r * stride + p * 8 + c] = 0.0f;
        }
        for (int64_t g = 0; g < rows.groups; g++) {
            for (int r = 0; r < R; r++) {
                const int8_t* x = rows.codes(r) + g * kGroup;
                for (int c = 0; c < 8; c++) {
                    int32_t sum = 0;
                    for (int j = 0; j < 8; j++) {
                        for (int i = 0; i < 4; i++) sum += w[g].codes[j][4 * c + i] * x[4 * j + i];
                    }
                    float& total = out[r * stride + p * 8 + c];
                    total = static_cast<float>(sum) * (w[g].scale[c] * rows.scales(r)[2 * g]) + total;
                }
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

template <class Codes>
const Kernels* dequantized_kernels() {
    static constexpr Kernels table[] = {
        {3, 2, multiply_dequantized<Codes, 3, 2>, multiply_dequantized<Codes, 3, 1>},
        {2, 2, multiply_dequantized<Codes, 2, 2>, multiply_dequantized<Codes, 2, 1>},
        {1, 4, multiply_dequantized<Codes, 1, 4>, multiply_dequantized<Codes, 1, 1>},
    };
    return table;
}

const Kernels* int4_kernels() {
    static constexpr Kernels table[] = {
        {4, 1, multiply_int4<4, 1>, multiply_int4<4, 1>},
        {3, 1, multiply_int4<3, 1>, multiply_int4<3, 1>},
        {2, 2, multiply_int4<2, 2>, multiply_int4<2, 1>},
        {1, 2, multiply_int4<1, 2>, multiply_int4<1, 1>},
    };
    return table;
}

const Kernels* int8_kernels() {
    static constexpr Kernels table[] = {
        {4, 1, multiply_int8<4, 1>, multiply_int8<4, 1>},
        {3, 1, multiply_int8<3, 1>, multiply_int8<3, 1>},
        {2, 2, multiply_int8<2, 2>, multiply_int8<2, 1>},
        {1, 2, multiply_int8<1, 2>, multiply_int8<1, 1>},
    };
    return table;
}

const Kernels* kernels_of(Kind kind, bool codes) {
    switch (kind) {
        case Kind::kFloat32: return float_kernels<Float32Panel>();
        case Kind::kBfloat16: return float_kernels<Bfloat16Panel>();
        case Kind::kInt4: return codes ? int4_kernels() : dequantized_kernels<Int4Codes>();
        case Kind::kInt8: return codes ? int8_kernels() : dequantized_kernels<Int8Codes>();
    }
    return nullptr;
}

#if TOKENMILL_X86
constexpr bool kPrefersCodes = kDot4;
#else
constexpr bool kPrefersCodes = false;
#endif

constexpr int kDequantizeFrom = 4;  // rows for which it pays to keep what codes stand for

// Columns of pairs of quantized panels for many rows of float32.
void multiply_pairs(const Weight& weight, const Buffer& x, int64_t row0, int rows, int64_t first, int64_t last, float* tile,
                    int stride) {
    static thread_local std::vector<float> values;
    values.resize(static_cast<size_t>(weight.k * 16));
    const float* w[1] = {values.data()};
    for (int64_t panel = first; panel < last; panel += 2) {
        if (weight.kind == Kind::kInt4) dequantize_pair<Int4Codes>(weight, panel, values.data());
        else dequantize_pair<Int8Codes>(weight, panel, values.data());
        float* out = tile + (panel - first) * 8;
        for (int r = 0; r < rows;) {
            const Rows some{x, row0 + r, x.width / kGroup};
            float* to = out + static_cast<int64_t>(r) * stride;
            const int left = rows - r;
            if (left >= 6) {
                multiply_panels<Float32Panel, 6, 1>(w, weight.k, some, to, stride);
                r += 6;
            } else if (left >= 4) {
                multiply_panels<Float32Panel, 4, 1>(w, weight.k, some, to, stride);
                r += 4;
            } else if (left >= 2) {
                multiply_panels<Float32Panel, 2, 1>(w, weight.k, some, to, stride);
                r += 2;
            } else {
                multiply_panels<Float32Panel, 1, 1>(w, weight.k, some, to, stride);
                r += 1;
            }
        }
    }
}

#if TOKENMILL_X86

constexpr int kExpandedRows = 4;
constexpr int kExpandedFrom = 8;  // rows for which it pays to expand

// Two panels for `rows` rows, of which the last few are left to the caller; returns how many are done.
int multiply_many(const Weight& weight, const Buffer& x, int64_t row0, int rows, int64_t panel, float* out, int stride) {
    static thread_local std::vector<Expanded> expanded;
    expanded.resize(static_cast<size_t>(weight.k / kGroup));
    expand(weight, panel, expanded.data());
    int r = 0;
    for (; r + kExpandedRows <= rows; r += kExpandedRows) {
        const Rows some{x, row0 + r, x.width / kGroup};
        multiply_expanded<kExpandedRows>(expanded.data(), some, out + static_cast<int64_t>(r) * stride, stride);
    }
    return r;
}

#else

constexpr int kExpandedFrom = 1 << 30;

int multiply_many(const Weight&, const Buffer&, int64_t, int, int64_t, float*, int) { return 0; }

#endif

}  // namespace

bool prefers_codes() { return kPrefersCodes; }

void multiply_tile(const Weight& weight, const Buffer& x, int64_t row0, int rows, int64_t col0, int cols, float* tile,
                   int stride) {
    const int width = panel_width(weight.kind);
    const int64_t first = col0 / width, last = std::min((col0 + cols + width - 1) / width, weight.panels());
    const int64_t groups = x.width / kGroup;
    const bool codes = x.codes != nullptr;
    const bool quantized = weight.kind == Kind::kInt4 || weight.kind == Kind::kInt8;
    if (quantized && !codes && rows >= kDequantizeFrom) {
        return multiply_pairs(weight, x, row0, rows, first, last, tile, stride);
    }
    const Kernels* all = kernels_of(weight.kind, codes);
    for (int64_t panel = first; panel < last;) {
        // Panels outside, rows inside: the panel stays in the first-level cache.
        const int64_t left = last - panel;
        int64_t step = all->panels;
        int r = 0;
        const bool many = weight.kind == Kind::kInt4 && codes && rows >= kExpandedFrom && left >= 2;
        if (many) {
            r = multiply_many(weight, x, row0, rows, panel, tile + (panel - first) * width, stride);
            step = 2;
        }
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
