// The vectors of matrix products: as wide as the instruction set has them.
//
// A lane is a column of the weight, and nothing adds up across lanes. So their number says how many results are computed
// at once, not how each is: AVX-512 and AVX2 give the same bits. Norms and attention do add up across lanes, in an order
// that depends on how many there are: they keep to eight (simd.h).
#pragma once

#include "simd.h"

namespace tokenmill {

#if defined(TOKENMILL_ISA_AVX512)

constexpr int kLanes = 16;

struct Floats {
    __m512 v;
};

inline Floats zero_floats() { return {_mm512_setzero_ps()}; }
inline Floats set_floats(float x) { return {_mm512_set1_ps(x)}; }
inline Floats load_floats(const float* p) { return {_mm512_loadu_ps(p)}; }
inline Floats load_floats(const Half* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline void store_floats(float* p, Floats x) { _mm512_storeu_ps(p, x.v); }
inline Floats operator*(Floats a, Floats b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Floats fma(Floats a, Floats b, Floats c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }

using Integers = __m512i;

inline Integers zero_integers() { return _mm512_setzero_si512(); }
inline Integers load_integers(const void* p) { return _mm512_loadu_si512(p); }
inline Integers set_integers(int32_t x) { return _mm512_set1_epi32(x); }
inline Floats to_floats(Integers x) { return {_mm512_cvtepi32_ps(x)}; }
// Of 32-bit lanes that hold two bfloat16, those in the lower and those in the upper halves.
inline Floats lower_bf16(Integers x) { return {_mm512_castsi512_ps(_mm512_slli_epi32(x, 16))}; }
inline Floats upper_bf16(Integers x) {
    return {_mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32(static_cast<int>(0xffff0000u))))};
}
// Of bytes, the lower and the upper four bits.
inline Integers lower_codes(Integers x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
inline Integers upper_codes(Integers x) { return lower_codes(_mm512_srli_epi16(x, 4)); }
// Of each lane, the four bits from `shift` on.
inline Integers codes_at(Integers x, int shift) {
    return _mm512_and_si512(_mm512_srl_epi32(x, _mm_cvtsi32_si128(shift)), _mm512_set1_epi32(15));
}
// Of pairs of bytes, the first and the second ones, as 16 bits with their signs.
inline Integers first_bytes(Integers x) { return _mm512_srai_epi16(_mm512_slli_epi16(x, 8), 8); }
inline Integers second_bytes(Integers x) { return _mm512_srai_epi16(x, 8); }
// sums + the products of two pairs of 16 bits
inline Integers add_products(Integers sums, Integers a, Integers b) { return _mm512_dpwssd_epi32(sums, a, b); }

// Sums of products of codes 0..15 with bytes -127..127, four in a lane, of a group of 32.
struct Int4Sums {
    Integers v = zero_integers();

    void add(Integers codes, Integers x) { v = _mm512_dpbusd_epi32(v, codes, x); }
    Floats whole() const { return to_floats(v); }
};

#else

constexpr int kLanes = 8;

using Floats = F8;

inline Floats zero_floats() { return zero8(); }
inline Floats set_floats(float x) { return set8(x); }
inline Floats load_floats(const float* p) { return load8(p); }
inline Floats load_floats(const Half* p) { return load8(p); }

#if TOKENMILL_X86

using Integers = __m256i;

inline void store_floats(float* p, Floats x) { store8(p, x); }
inline Integers zero_integers() { return _mm256_setzero_si256(); }
inline Integers load_integers(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline Integers set_integers(int32_t x) { return _mm256_set1_epi32(x); }
inline Floats to_floats(Integers x) { return {_mm256_cvtepi32_ps(x)}; }
inline Floats lower_bf16(Integers x) { return {_mm256_castsi256_ps(_mm256_slli_epi32(x, 16))}; }
inline Floats upper_bf16(Integers x) {
    return {_mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32(static_cast<int>(0xffff0000u))))};
}
inline Integers lower_codes(Integers x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
inline Integers upper_codes(Integers x) { return lower_codes(_mm256_srli_epi16(x, 4)); }
inline Integers codes_at(Integers x, int shift) {
    return _mm256_and_si256(_mm256_srl_epi32(x, _mm_cvtsi32_si128(shift)), _mm256_set1_epi32(15));
}
inline Integers first_bytes(Integers x) { return _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8); }
inline Integers second_bytes(Integers x) { return _mm256_srai_epi16(x, 8); }
inline Integers add_products(Integers sums, Integers a, Integers b) {
    sums = _mm256_add_epi32(sums, _mm256_madd_epi16(a, b));
    asm("" : "+x"(sums));  // compilers would add up products first, for which there are no registers left
    return sums;
}

// In 16 bits: 8 * 2 * 15 * 127 is 30,480.
struct Int4Sums {
    Integers v = zero_integers();

    void add(Integers codes, Integers x) {
        v = _mm256_add_epi16(v, _mm256_maddubs_epi16(codes, x));
        asm("" : "+x"(v));
    }
    Floats whole() const { return to_floats(_mm256_madd_epi16(v, _mm256_set1_epi16(1))); }
};

#else

inline void store_floats(float* p, const Floats& x) { store8(p, x); }

#endif

#endif

}  // namespace tokenmill
