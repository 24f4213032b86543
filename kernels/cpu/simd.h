// Eight floats at a time: AVX2 with FMA, or plain loops that any compiler can read.
//
// Reductions have a fixed order and products are fused only where `fma` says so (the build passes -ffp-contract=off):
// the same inputs give the same bits whatever the compiler, the thread count or the other rows of a batch.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(TOKENMILL_ISA_AVX2) || defined(TOKENMILL_ISA_AVX512)
#define TOKENMILL_X86 1
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"  // GCC 12 sees them in its own header of AVX-512 (its bug 105593)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#else
#define TOKENMILL_X86 0
#endif

namespace tokenmill {

using bf16 = uint16_t;

inline float bf16_to_float(bf16 x) {
    uint32_t bits = static_cast<uint32_t>(x) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

// Rounded to nearest even; NaN stays NaN.
inline bf16 float_to_bf16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<bf16>((bits >> 16) | 64);
    return static_cast<bf16>((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

// Asks for memory that is needed soon.
inline void prefetch(const void* start, size_t bytes) {
#if defined(__GNUC__)
    const char* p = static_cast<const char*>(start);
    for (size_t at = 0; at < bytes; at += 64) __builtin_prefetch(p + at);
#endif
}

uint16_t float_to_half(float x);
float half_to_float(uint16_t x);

// An IEEE half float. Numbers beyond 65504 are stored as that: an infinite value would make all sums that it has no part
// in NaN, as 0 times it. NaN stays NaN.
struct Half {
    uint16_t bits;
};

#if TOKENMILL_X86

struct F8 {
    __m256 v;
};

inline F8 zero8() { return {_mm256_setzero_ps()}; }
inline F8 set8(float x) { return {_mm256_set1_ps(x)}; }
inline F8 load8(const float* p) { return {_mm256_loadu_ps(p)}; }
inline F8 load8(const bf16* p) {
    __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16))};
}
inline F8 load8(const Half* p) { return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))}; }
inline F8 load8(const int8_t* p) {
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))))};
}
inline void store8(float* p, F8 x) { _mm256_storeu_ps(p, x.v); }
inline void store8(Half* p, F8 x) {
    // Both give their second operand where one is NaN.
    const __m256 held = _mm256_min_ps(_mm256_set1_ps(65504.0f), _mm256_max_ps(_mm256_set1_ps(-65504.0f), x.v));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(held, _MM_FROUND_TO_NEAREST_INT));
}
inline F8 operator+(F8 a, F8 b) { return {_mm256_add_ps(a.v, b.v)}; }
inline F8 operator-(F8 a, F8 b) { return {_mm256_sub_ps(a.v, b.v)}; }
inline F8 operator*(F8 a, F8 b) { return {_mm256_mul_ps(a.v, b.v)}; }
inline F8 operator/(F8 a, F8 b) { return {_mm256_div_ps(a.v, b.v)}; }
inline F8 fma(F8 a, F8 b, F8 c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
inline F8 max8(F8 a, F8 b) { return {_mm256_max_ps(a.v, b.v)}; }
inline F8 min8(F8 a, F8 b) { return {_mm256_min_ps(a.v, b.v)}; }
inline F8 abs8(F8 a) { return {_mm256_andnot_ps(_mm256_set1_ps(-0.0f), a.v)}; }
inline F8 round8(F8 a) { return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
// 2^n for whole n in -126..127; 0 for -127
inline F8 power_of_two(F8 n) {
    __m256i bits = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n.v), _mm256_set1_epi32(127)), 23);
    return {_mm256_castsi256_ps(bits)};
}
// x where a >= b, else 0; x where a or b is NaN
inline F8 keep_unless_less(F8 x, F8 a, F8 b) { return {_mm256_and_ps(x.v, _mm256_cmp_ps(a.v, b.v, _CMP_NLT_UQ))}; }
// 16 whole numbers in -32767..32767, of every four the first, third, second, fourth
inline void store_codes(int16_t* p, F8 a, F8 b) {
    __m256i codes = _mm256_packs_epi32(_mm256_cvtps_epi32(a.v), _mm256_cvtps_epi32(b.v));
    codes = _mm256_permute4x64_epi64(codes, 0xd8);
    codes = _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(codes, 0xd8), 0xd8);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), codes);
}
// 32 whole numbers in -127..127, in order
inline void store_codes(int8_t* p, const F8* parts) {
    const auto whole = [&](int i) { return _mm256_cvtps_epi32(parts[i].v); };
    const __m256i codes = _mm256_packs_epi16(_mm256_packs_epi32(whole(0), whole(1)), _mm256_packs_epi32(whole(2), whole(3)));
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permutevar8x32_epi32(codes, order));
}
inline float sum8(F8 a) {
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}
inline float largest8(F8 a) {
    __m128 x = _mm_max_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}

#else

struct F8 {
    float v[8];
};

template <class Op>
inline F8 each(Op op) {
    F8 r;
    for (int i = 0; i < 8; i++) r.v[i] = op(i);
    return r;
}
inline F8 set8(float x) { return each([&](int) { return x; }); }
inline F8 zero8() { return set8(0.0f); }
inline F8 load8(const float* p) { return each([&](int i) { return p[i]; }); }
inline F8 load8(const bf16* p) { return each([&](int i) { return bf16_to_float(p[i]); }); }
inline F8 load8(const Half* p) { return each([&](int i) { return half_to_float(p[i].bits); }); }
inline F8 load8(const int8_t* p) { return each([&](int i) { return static_cast<float>(p[i]); }); }
inline void store8(float* p, F8 x) { std::memcpy(p, x.v, sizeof x.v); }
inline void store8(Half* p, F8 x) {
    for (int i = 0; i < 8; i++) {
        const float v = x.v[i];
        p[i].bits = float_to_half(v > 65504.0f ? 65504.0f : v < -65504.0f ? -65504.0f : v);
    }
}
inline F8 operator+(F8 a, F8 b) { return each([&](int i) { return a.v[i] + b.v[i]; }); }
inline F8 operator-(F8 a, F8 b) { return each([&](int i) { return a.v[i] - b.v[i]; }); }
inline F8 operator*(F8 a, F8 b) { return each([&](int i) { return a.v[i] * b.v[i]; }); }
inline F8 operator/(F8 a, F8 b) { return each([&](int i) { return a.v[i] / b.v[i]; }); }
// Not fused here: without the instruction, std::fma is a library call.
inline F8 fma(F8 a, F8 b, F8 c) { return each([&](int i) { return a.v[i] * b.v[i] + c.v[i]; }); }
inline F8 max8(F8 a, F8 b) { return each([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; }); }
inline F8 min8(F8 a, F8 b) { return each([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; }); }
inline F8 abs8(F8 a) { return each([&](int i) { return std::fabs(a.v[i]); }); }
inline F8 round8(F8 a) { return each([&](int i) { return std::nearbyintf(a.v[i]); }); }
inline F8 power_of_two(F8 n) {
    return each([&](int i) {
        // What is outside does not matter: it comes from NaN, and is multiplied by it.
        const float whole = n.v[i] >= -127.0f && n.v[i] <= 127.0f ? n.v[i] : 0.0f;
        uint32_t bits = (static_cast<uint32_t>(static_cast<int32_t>(whole)) + 127u) << 23;
        float value;
        std::memcpy(&value, &bits, 4);
        return value;
    });
}
inline F8 keep_unless_less(F8 x, F8 a, F8 b) { return each([&](int i) { return a.v[i] < b.v[i] ? 0.0f : x.v[i]; }); }
inline void store_codes(int16_t* p, F8 a, F8 b) {
    constexpr int order[4] = {0, 2, 1, 3};
    const auto code = [](float x) { return static_cast<int16_t>(x); };
    for (int i = 0; i < 8; i++) {
        p[i] = code(a.v[i / 4 * 4 + order[i % 4]]);
        p[8 + i] = code(b.v[i / 4 * 4 + order[i % 4]]);
    }
}
inline void store_codes(int8_t* p, const F8* parts) {
    for (int i = 0; i < 32; i++) p[i] = static_cast<int8_t>(parts[i / 8].v[i % 8]);
}
inline float sum8(F8 a) {
    const float* v = a.v;
    return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}
inline float largest8(F8 a) {
    float best = a.v[0];
    for (int i = 1; i < 8; i++) best = a.v[i] > best ? a.v[i] : best;
    return best;
}

#endif

inline void store8(bf16* p, F8 x) {
    float values[8];
    store8(values, x);
    for (int i = 0; i < 8; i++) p[i] = float_to_bf16(values[i]);
}

// e^x, relative error below 2e-7; 0 below -87.3 (also for -inf), no more than e^88; NaN gives NaN.
// Range reduction to |r| <= ln 2 / 2 and a polynomial of degree 6 (Cody & Waite 1980).
inline F8 exp8(F8 x) {
    const F8 lowest = set8(-87.3f);
    const F8 inside = min8(set8(88.0f), max8(lowest, x));  // both give their second operand where one is NaN
    const F8 n = round8(inside * set8(1.44269504f));
    F8 r = fma(n, set8(-0.693145751953125f), inside);
    r = fma(n, set8(-1.42860677e-6f), r);
    F8 p = set8(1.0f / 720);
    p = fma(p, r, set8(1.0f / 120));
    p = fma(p, r, set8(1.0f / 24));
    p = fma(p, r, set8(1.0f / 6));
    p = fma(p, r, set8(0.5f));
    p = fma(p, r, set8(1.0f));
    p = fma(p, r, set8(1.0f));
    return keep_unless_less(p * power_of_two(n), x, lowest);
}

// 2^x for x <= 0, relative error below 3e-7; 0 below -126.5 (also for -inf); NaN gives NaN.
// The polynomial is that of degree 5, with 1 at 0, of the least relative error on -0.5..0.5 (Lawson's iteration).
inline F8 exp2_8(F8 x) {
    const F8 inside = max8(set8(-127.0f), x);  // gives its second operand where one is NaN
    const F8 n = round8(inside);
    const F8 r = inside - n;
    F8 p = set8(0.00132647273f);
    p = fma(p, r, set8(0.00967151299f));
    p = fma(p, r, set8(0.0555073358f));
    p = fma(p, r, set8(0.240222424f));
    p = fma(p, r, set8(0.693147004f));
    p = fma(p, r, set8(1.0f));
    return p * power_of_two(n);  // of -127: 0
}

inline float exp2_of(float x) {
    float out[8];
    store8(out, exp2_8(set8(x)));
    return out[0];
}

}  // namespace tokenmill
